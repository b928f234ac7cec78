// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/attributes.h"
#include "normscope/core/independent_values.h"
#include "normscope/core/tensor_view.h"
#include "normscope/kernels/kernels.h"

namespace normscope NORMSCOPE_EXPORT {

// The moments of x [N, C, *], cut along N into parts whose sizes differ by at most one, larger
// parts first. The number of independent values of a batch is estimated from them. x must be in
// host memory.
//
// Throws ArgumentError if `parts` is below 1, or if x is invalid.
[[nodiscard]] PartMoments part_moments(const TensorView& x, std::int64_t parts,
                                       const Kernels& kernels, const Execution& execution);

}  // namespace normscope
