// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/ops/recomputation.h"

#include <utility>

#include <torch/csrc/autograd/graph_task.h>

namespace normscope::binding {
namespace {

thread_local bool updates_in_backward = false;

}  // namespace

bool batch_was_counted() {
  return !updates_in_backward && ::torch::autograd::get_current_graph_task_id() >= 0;
}

bool set_updates_in_backward(bool wanted) { return std::exchange(updates_in_backward, wanted); }

}  // namespace normscope::binding
