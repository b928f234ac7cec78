// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/c10d/private_group.h"

#include <exception>
#include <new>
#include <numeric>
#include <utility>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "normscope/core/error.h"
#include "normscope/torch/ops/operators.h"

namespace normscope::binding {
namespace {

std::vector<int> all_ranks_of(const c10d::ProcessGroup& group) {
  std::vector<int> ranks(static_cast<std::size_t>(group.getSize()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// A name that no other group has: a store may outlive a group, and then serve another group of the
// same name. All ranks have the same count, because each use of a group is collective.
std::string new_name(c10d::ProcessGroup& group, const std::string& name, const std::string& use) {
  const std::string prefix = "normscope/" + name + "/" + use + "/";
  const std::int64_t number =
      group.getStore()->add(prefix + "of rank " + std::to_string(group.getRank()), 1);
  return prefix + std::to_string(number);
}

std::string text_of(int rank, std::string_view reason) {
  return "rank " + std::to_string(rank) + " failed: " + std::string(reason);
}

}  // namespace

OwnGroup::OwnGroup(std::string name, std::string parent, std::vector<int> ranks, GroupStore store,
                   Milliseconds time_limit)
    : name_(std::move(name)),
      parent_(std::move(parent)),
      ranks_(std::move(ranks)),
      store_(std::move(store)),
      time_limit_(time_limit) {}

OwnGroup::OwnGroup(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& name,
                   const std::string& use, Milliseconds time_limit)
    : name_(new_name(*group, name, use)),
      parent_(name),
      ranks_(all_ranks_of(*group)),
      store_(c10::make_intrusive<c10d::PrefixStore>(name_, group->getStore()), group->getRank(),
             ranks_),
      time_limit_(time_limit) {
  store_.meet("begun", time_limit_);
  make();
}

std::unique_ptr<OwnGroup> OwnGroup::part(const std::string& name,
                                         const std::vector<int>& members) const {
  std::vector<int> ranks;
  for (const int member : members) {
    ranks.push_back(ranks_[static_cast<std::size_t>(member)]);
  }
  auto part = std::unique_ptr<OwnGroup>(new OwnGroup(name_ + "/" + name, parent_, std::move(ranks),
                                                     store_.part(name, members), time_limit_));
  part->make();
  return part;
}

void OwnGroup::refuse(c10d::ProcessGroup& group, const std::string& name, const std::string& use,
                      std::string_view reason) noexcept {
  try {
    const auto store =
        c10::make_intrusive<c10d::PrefixStore>(new_name(group, name, use), group.getStore());
    GroupStore(store, group.getRank(), all_ranks_of(group)).fail(text_of(group.getRank(), reason));
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // Peers then find out at their time limit.
  }
}

void OwnGroup::make() {
  const std::vector<std::int64_t> ranks(ranks_.begin(), ranks_.end());
  const auto op = op_named<MakeProcessGroupOp>("normscope::make_process_group");
  std::string error;
  try {
    error = op.call(name_, parent_, ranks, std::chrono::duration<double>(time_limit_).count());
    if (error.empty()) group_ = c10d::resolve_process_group(name_);
  } catch (const c10::Error& of_torch) {
    error = of_torch.what_without_backtrace();
  }
  if (error.empty()) {
    // A rank may be connected before the others. It must not leave before they are connected.
    store_.meet("made", time_limit_);
    return;
  }
  const std::string text =
      "torch.distributed made no group for normscope's messages alone, next to the group \"" +
      parent_ + "\": " + error;
  store_.fail(text);
  throw CommunicationError(text);
}

void OwnGroup::close() noexcept {
  try {
    op_named<CloseProcessGroupOp>("normscope::close_process_group").call(name_);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // Peers then find out at their time limit.
  }
}

void OwnGroup::fail(std::string_view reason) noexcept {
  store_.fail(text_of(store_.name(), reason));
  close();
}

void OwnGroup::abandon(std::string_view reason) noexcept {
  store_.fail(text_of(store_.name(), reason));
  static_cast<void>(new (std::nothrow) c10::intrusive_ptr<c10d::ProcessGroup>(group_.lock()));
  close();
}

std::string OwnGroup::fail_after(const std::string& what,
                                 const std::function<std::string()>& who_is_where) noexcept {
  // This comes first: it ends the waits of the other ranks, which can then report that they are
  // present.
  close();
  if (const auto first = store_.failure()) return *first;
  std::string text = store_.who_is_missing() + " (" + what + ")";
  if (const std::string where = who_is_where(); !where.empty()) text += ": " + where;
  store_.fail(text);
  return text;
}

}  // namespace normscope::binding
