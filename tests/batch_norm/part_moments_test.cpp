// SPDX-License-Identifier: Apache-2.0
#include "normscope/batch_norm/part_moments.h"

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "normscope/core/error.h"
#include "tests/support/execution.h"
#include "tests/support/inputs.h"
#include "tests/support/oracle.h"
#include "tests/support/tolerance.h"

namespace normscope::testing {
namespace {

constexpr std::int64_t kChannels = 5;
constexpr std::int64_t kPositions = 37;

using Case = std::tuple<DType, Layout, Inputs>;

class PartMomentsTest : public ::testing::TestWithParam<Case> {};

// 7 samples in parts of 3, 2 and 2, as in torch.tensor_split.
TEST_P(PartMomentsTest, AreThoseOfTheDefinition) {
  const auto [dtype, layout, inputs] = GetParam();
  Tensor x(dtype, layout, 7, kChannels, kPositions, {.before = 1, .row = 3, .sample = 2});
  fill(x, inputs, Role::kX);
  const std::vector<std::vector<std::int64_t>> samples = {{0, 1, 2}, {3, 4}, {5, 6}};

  const PartMoments moments =
      part_moments(std::as_const(x).view(), 3, default_kernels(), on_threads(2));

  ASSERT_EQ(moments.parts, 3);
  for (std::int64_t k = 0; k < 3; ++k) {
    const std::vector<std::int64_t>& of_part = samples[static_cast<std::size_t>(k)];
    Tensor part(dtype, layout, static_cast<std::int64_t>(of_part.size()), kChannels, kPositions);
    fill(part, inputs, Role::kX, of_part);
    const auto row = moments.row(0, k);
    EXPECT_EQ(row[0], static_cast<double>(of_part.size() * kPositions));
    for (std::int64_t c = 0; c < kChannels; ++c) {
      const ChannelMoments expected = moments_of({&part}, c);
      const double mean = row[static_cast<std::size_t>(1 + c)];
      const double variance = row[static_cast<std::size_t>(1 + kChannels + c)];
      if (!std::isfinite(expected.variance)) {
        EXPECT_FALSE(std::isfinite(mean) && std::isfinite(variance));
        continue;
      }
      const StatisticsError error = statistics_error(dtype, expected, 0.0);
      // Rounded to float64 at the end.
      EXPECT_LE(std::abs(mean - expected.mean), error.mean + 0x1p-50L * expected.largest);
      EXPECT_LE(std::abs(variance - expected.variance),
                error.variance + 0x1p-50L * expected.variance);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, PartMomentsTest,
                         ::testing::Combine(::testing::ValuesIn(kAllDTypes),
                                            ::testing::ValuesIn(kAllLayouts),
                                            ::testing::ValuesIn(kAllInputs)),
                         [](const auto& parameters) {
                           return std::string(name_of(std::get<0>(parameters.param))) + "_" +
                                  name_of(std::get<1>(parameters.param)) + "_" +
                                  name_of(std::get<2>(parameters.param));
                         });

TEST(PartMoments, OfAnEmptyPartAreZeros) {
  Tensor x(DType::kFloat32, Layout::kChannelsFirst, 1, 2, 3);
  fill(x, Inputs::kCentred, Role::kX);

  const PartMoments moments = part_moments(std::as_const(x).view(), 2, default_kernels(), {});

  EXPECT_EQ(moments.row(0, 0)[0], 3.0);
  for (const double value : moments.row(0, 1)) EXPECT_EQ(value, 0.0);
}

}  // namespace
}  // namespace normscope::testing
