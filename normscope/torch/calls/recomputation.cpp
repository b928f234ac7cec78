// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/calls/recomputation.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <typeinfo>
#include <utility>

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

namespace normscope::binding {
namespace {

using ::torch::autograd::Node;

thread_local bool updates_in_backward = false;

// How much is remembered: marks of a thread, and threads.
constexpr std::size_t kMostMarks = 256;
constexpr std::size_t kMostThreads = 4096;

// From this node of a thread on, the last change has this number. A forward notes it late, if the
// change was made in another thread or if the forward is a recomputation: nodes just before the
// mark may belong to the forward, unless they are older than the forward before.
struct Mark {
  std::uint64_t node;
  std::int64_t change;
  bool is_of_forward_without_grad;
  std::uint64_t last_forward;  // the next node at the last forward that noted the same change
};

// Whether a function in Python made the node. It may then have run the forward without making
// further nodes, as reentrant checkpoints and compiled graphs do.
bool is_of_function_in_python(const Node& node) {
  return c10::demangle(typeid(node).name()) == "torch::autograd::PyNode";
}

// The marks of one thread, in the order of its nodes.
class Marks {
 public:
  void add_change(std::int64_t change) { add(change, /*is_of_forward_without_grad=*/false); }

  void add_forward(std::int64_t change) {
    add(change, !at::GradMode::is_enabled());
    marks_.back().last_forward = at::sequence_number::peek();
  }

  // The last change before a node was made.
  [[nodiscard]] std::int64_t change_before(const Node& node) const {
    const std::uint64_t number = node.sequence_nr();
    TORCH_CHECK(number >= first_known_, "scope: expected at most ", kMostMarks,
                " changes between a forward and its recomputation, got more");
    const auto next = std::ranges::upper_bound(marks_, number, {}, &Mark::node);
    if (next == marks_.begin()) return next->change;
    const auto mark = std::prev(next);
    const bool belongs_to_next = next != marks_.end() && next->is_of_forward_without_grad &&
                                 number >= mark->last_forward && is_of_function_in_python(node);
    return belongs_to_next ? next->change : mark->change;
  }

 private:
  void add(std::int64_t change, bool is_of_forward_without_grad) {
    if (!marks_.empty() && marks_.back().change == change) return;
    if (marks_.size() == kMostMarks) {
      marks_.pop_front();
      first_known_ = marks_.front().node;
    }
    const std::uint64_t node = at::sequence_number::peek();
    marks_.push_back({node, change, is_of_forward_without_grad, node});
  }

  std::deque<Mark> marks_;
  std::uint64_t first_known_ = 0;
};

class Changes {
 public:
  std::int64_t note() {
    const std::lock_guard lock(mutex_);
    if (std::exchange(has_forward_since_, false)) ++latest_;
    of_this_thread().add_change(latest_);
    return latest_;
  }

  void note_forward(std::int64_t change) {
    const std::lock_guard lock(mutex_);
    has_forward_since_ = true;
    of_this_thread().add_forward(change);
  }

  [[nodiscard]] std::int64_t latest() const {
    const std::lock_guard lock(mutex_);
    return latest_;
  }

  [[nodiscard]] std::int64_t before(const Node& node) const {
    const std::lock_guard lock(mutex_);
    const auto found = of_thread_.find(node.thread_id());
    return found == of_thread_.end() ? latest_ : found->second.change_before(node);
  }

 private:
  Marks& of_this_thread() {
    // Threads are numbered as they start.
    if (of_thread_.size() > kMostThreads) of_thread_.erase(of_thread_.begin());
    return of_thread_[at::RecordFunction::currentThreadId()];
  }

  mutable std::mutex mutex_;
  std::int64_t latest_ = 0;
  bool has_forward_since_ = false;
  std::map<std::uint64_t, Marks> of_thread_;
};

Changes& changes() {
  static Changes changes;
  return changes;
}

}  // namespace

bool runs_inside_a_backward() { return ::torch::autograd::get_current_graph_task_id() >= 0; }

bool batch_was_counted() { return !updates_in_backward && runs_inside_a_backward(); }

bool set_updates_in_backward(bool wanted) { return std::exchange(updates_in_backward, wanted); }

std::int64_t note_change_of_scope() { return changes().note(); }

std::int64_t change_before_forward() {
  if (!runs_inside_a_backward()) return changes().latest();
  const auto node = ::torch::autograd::get_current_node();
  return node == nullptr ? changes().latest() : changes().before(*node);
}

void note_forward() { changes().note_forward(change_before_forward()); }

void note_forward_in_graph(std::string_view layer) {
  const std::int64_t change = change_before_forward();
  TORCH_CHECK(change == changes().latest(), layer.empty() ? "a layer" : std::string(layer),
              ": expected no change of a scope between the forward of a compiled layer and its "
              "recomputation, got one; change scopes after backward");
  changes().note_forward(change);
}

}  // namespace normscope::binding
