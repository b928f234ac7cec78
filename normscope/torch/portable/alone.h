// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/torch/ops/arguments.h"

namespace normscope::binding {

// torch.nn's layer, for a rank alone or for each slice; operations of torch, with their gradients.
[[nodiscard]] at::Tensor normalize_on_this_rank(const ForwardOpArguments& op,
                                                const Slicing& slicing);

}  // namespace normscope::binding
