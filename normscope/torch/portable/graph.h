// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/torch/portable/batch_norm.h"

namespace normscope::binding {

// Forward and backward of ranks that share statistics in a recorded graph: operations of torch,
// which a compiler fuses with those before and after, and one op portable_sum between two calls of
// keep_order (ops/graph.h).
[[nodiscard]] PortableTensors portable_forward_in_graph(const ForwardOpArguments& op);
[[nodiscard]] GradientTensors portable_backward_in_graph(const PortableBackwardArguments& op);

}  // namespace normscope::binding
