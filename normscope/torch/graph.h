// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

#include "normscope/torch/operators.h"

namespace normscope::binding {

// Forward and backward as a compiled graph has them: statistics and gradient sums by functional
// ops, which give buffers new values instead of changing them. With `decompose` what is done to
// each element is left to torch's ops, which a compiler fuses with those before and after
// (docs/numerics.md, "Compiled graphs", says what that may round differently); else it is one op
// with the bits of eager mode.
//
// Ranks must meet in one order, whatever else a compiler moves about. So an exchange lies between
// two calls of keep_order, which compilers keep in order and never repeat (_library.py says so to
// them). That op takes small tensors alone: such ops are given their arguments in any layout.

// Whether ops that are called now are recorded for a functional graph, as by AOTAutograd.
[[nodiscard]] bool is_recorded_for_a_graph();

[[nodiscard]] std::tuple<at::Tensor, at::Tensor> forward_in_graph(const ForwardOpArguments& op);
[[nodiscard]] GradientTensors backward_in_graph(const BackwardOpArguments& op);

}  // namespace normscope::binding
