// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/torch/calls/arguments.h"

namespace normscope::binding::autograd {

// The forward of tensors that uses_torch_kernels() accepts, with a node for autograd if
// op.needs_backward is true.
[[nodiscard]] ForwardTensors forward_by_torchs_kernels(const ForwardOpArguments& op);

}  // namespace normscope::binding::autograd
