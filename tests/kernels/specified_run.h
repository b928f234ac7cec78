// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include <gtest/gtest.h>

#include "normscope/kernels/kernels.h"
#include "tests/kernels/channel_run.h"
#include "tests/kernels/tile_specification.h"
#include "tests/support/tensor.h"

namespace normscope::testing {

// Fails unless the limbs of a channel have these bits.
inline void expect_limbs(const OwnedLimbs& got, std::int64_t c, const ChannelLimbs& expected) {
  for (int sum = 0; sum < kSums; ++sum) {
    for (int k = 0; k < kLimbs; ++k) {
      ASSERT_PRED2(same_bits, got.limb(sum, k, c), expected.sums[sum][k])
          << "sum " << sum << " limb " << k;
    }
  }
}

// Fails unless channel c of a run has the bits of the specification.
template <class Element>
void expect_as_specified(const Tensor& x, const Tensor& dy, KernelRun& run,
                         const ChannelArray& weight, const ChannelArray& bias, std::int64_t c) {
  const Statistics statistics = run.statistics.view().read_only();
  expect_limbs(run.moments, c, specified_moments<Element>(x.view(), c));
  expect_limbs(run.gradient_sums, c,
               specified_gradient_sums<Element>(x.view(), dy.view(), c, statistics.mean_hi[c]));
  const SpecifiedChannel channel{statistics.mean_hi[c], statistics.mean_lo[c],
                                 statistics.inv_std[c], weight[c], bias[c]};
  const auto i = static_cast<std::size_t>(c);
  const auto count = static_cast<double>(x.view().elements_per_channel());
  for (std::int64_t n = 0; n < x.samples(); ++n) {
    for (std::int64_t p = 0; p < x.positions(); ++p) {
      ASSERT_PRED2(same_bits, run.y.at(n, c, p), specified_y<Element>(channel, x.at(n, c, p)));
      ASSERT_PRED2(same_bits, run.dx.at(n, c, p),
                   specified_dx<Element>(channel, run.dy_sum[i], run.dy_xhat_sum[i], count,
                                         x.at(n, c, p), dy.at(n, c, p)));
    }
  }
}

}  // namespace normscope::testing
