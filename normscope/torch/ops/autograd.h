// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include <ATen/core/Tensor.h>

#include "normscope/core/attributes.h"
#include "normscope/torch/calls/arguments.h"

namespace normscope::binding::autograd {

// The forward of tensors that uses_torch_kernels() accepts, with a node for autograd if
// op.needs_backward is true.
[[nodiscard]] ForwardTensors forward_by_torchs_kernels(const ForwardOpArguments& op);

// What follows the normalization: returns the output of the layer, of that of the normalization.
using Ending = std::function<at::Tensor(const at::Tensor& y)>;

// Calls the op without an ending, and then `ending`. Whichever throws, the buffers stay as they
// are, and the peers are notified.
[[nodiscard]] NORMSCOPE_EXPORT at::Tensor forward_then(const ForwardOpArguments& op,
                                                       const Ending& ending);

}  // namespace normscope::binding::autograd
