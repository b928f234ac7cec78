// SPDX-License-Identifier: Apache-2.0
//
// Sums whose ranks are kernels that wait for each other. shared_device_test.cpp tests them as
// layers use them.
#include "tests/comm/on_device/device_communicator.h"

#include <chrono>
#include <cstddef>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kernels/device_stream.h"

namespace normscope::testing {
namespace {

using namespace std::chrono_literals;

// What a rank adds to a sum. Sizes around the number of threads; the order of the ranks matters.
std::vector<double> values_of(int rank, int sum) {
  std::vector<double> values(static_cast<std::size_t>(sum * 37 % 300));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = (1 + sum + static_cast<double>(i)) * (rank % 2 == 0 ? 0x1p60 : -0x1p59 / 3.0);
  }
  return values;
}

std::vector<double> total_of(int ranks, int sum) {
  std::vector<double> total = values_of(0, sum);
  for (int rank = 1; rank < ranks; ++rank) {
    const std::vector<double> values = values_of(rank, sum);
    for (std::size_t i = 0; i < total.size(); ++i) total[i] += values[i];
  }
  return total;
}

class SumsOnADevice : public ::testing::TestWithParam<int> {};

TEST_P(SumsOnADevice, FollowEachOtherWithoutWaitingForTheHost) {
  constexpr int kSums = 300;
  run_as_threads_on_device(GetParam(), {.time_limit = 20s}, [](Communicator& ranks) {
    const DeviceStream stream;
    std::vector<std::vector<double>> sums;
    for (int sum = 0; sum < kSums; ++sum) sums.push_back(values_of(ranks.rank(), sum));

    for (std::vector<double>& values : sums) ranks.all_reduce_sum(values, stream.get());

    stream.wait();
    for (int sum = 0; sum < kSums; ++sum) {
      ASSERT_EQ(sums[static_cast<std::size_t>(sum)], total_of(ranks.size(), sum)) << sum;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, SumsOnADevice, ::testing::Values(1, 2, 3, 4),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace normscope::testing
