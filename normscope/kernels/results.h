// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/attributes.h"
#include "normscope/core/limbs.h"
#include "normscope/kernels/channel_view.h"
#include "normscope/kernels/statistics.h"

namespace normscope NORMSCOPE_EXPORT {

// Sums of the gradients over a norm batch, or over one rank's part of it.
struct GradientSums {
  double* dy = nullptr;       // [C] g1 = sum(dy)
  double* dy_xhat = nullptr;  // [C] g2 = sum(dy * xhat)

  [[nodiscard]] constexpr GradientSums channel_range(std::int64_t begin) const noexcept {
    return {dy + begin, dy_xhat + begin};
  }
};

// Outputs of finalize_moments; outputs without data are skipped.
struct MomentsResults {
  MutableStatistics statistics;
  RunningUpdate running = {};
  LimbsView pooled = {};    // += the limbs, for norm batches that share one running update
  double* count = nullptr;  // = the norm batch's count
};

// Outputs of finalize_gradient_sums, for a norm batch or for one rank's part of it.
struct GradientResults {
  GradientSums sums;
  GradientSums all = {};            // += sums, for a rank with several norm batches
  MutableChannelView dweight = {};  // = all.dy_xhat if `all` is present, else sums.dy_xhat
  MutableChannelView dbias = {};    // = all.dy if `all` is present, else sums.dy
};

}  // namespace normscope
