// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/calls/recomputation.h"

#include <utility>

#include <torch/csrc/autograd/graph_task.h>

namespace normscope::binding {
namespace {

thread_local bool updates_in_backward = false;

}  // namespace

bool runs_inside_a_backward() { return ::torch::autograd::get_current_graph_task_id() >= 0; }

bool batch_was_counted() { return !updates_in_backward && runs_inside_a_backward(); }

bool set_updates_in_backward(bool wanted) { return std::exchange(updates_in_backward, wanted); }

}  // namespace normscope::binding
