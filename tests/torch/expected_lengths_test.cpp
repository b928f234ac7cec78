// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/c10d/expected_lengths.h"

#include <cstddef>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

namespace normscope::testing {
namespace {

using binding::ExpectedLengths;

// The number of lengths that were expected.
int expected_of(ExpectedLengths& lengths, const std::vector<std::size_t>& messages) {
  int expected = 0;
  for (const std::size_t length : messages) {
    if (lengths.next() == length) ++expected;
    lengths.add(length);
  }
  return expected;
}

TEST(ExpectedLengths, StepsThatRepeatAreExpected) {
  const std::vector<std::size_t> step = {644, 644, 2564, 644, 644, 2564, 1284, 12, 1284};
  ExpectedLengths lengths;
  EXPECT_LT(expected_of(lengths, step), static_cast<int>(step.size()));
  // Until the last few lengths are those of a whole step, too.
  expected_of(lengths, step);

  EXPECT_EQ(expected_of(lengths, step), static_cast<int>(step.size()));
}

TEST(ExpectedLengths, MessagesThatNeverRepeatDoNotFillTheMemory) {
  constexpr std::size_t kMany = (1 << 20) + 100;
  ExpectedLengths lengths;
  for (std::size_t length = 0; length < kMany; ++length) lengths.add(length);

  // The first lengths have been forgotten, the last ones have not.
  for (std::size_t length = 0; length < 9; ++length) lengths.add(length);
  EXPECT_EQ(lengths.next(), std::nullopt);
  for (std::size_t length = kMany - 9; length < kMany - 1; ++length) lengths.add(length);
  EXPECT_EQ(lengths.next(), kMany - 1);
}

}  // namespace
}  // namespace normscope::testing
