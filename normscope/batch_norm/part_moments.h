// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/export.h"
#include "normscope/core/independent_values.h"
#include "normscope/core/tensor_view.h"
#include "normscope/kernels/kernels.h"

namespace normscope NORMSCOPE_EXPORT {

// The moments of x [N, C, *] cut along N into parts whose sizes differ by one at most, the larger
// ones first: how many independent values a batch is worth is estimated from them. x is in the
// host's memory.
//
// Throws ArgumentError.
[[nodiscard]] PartMoments part_moments(const TensorView& x, std::int64_t parts,
                                       const Kernels& kernels, const Execution& execution);

}  // namespace normscope
