// SPDX-License-Identifier: Apache-2.0
//
// Sums whose ranks are kernels that wait for each other.
#include "tests/comm/on_device/device_communicator.h"

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/core/error.h"
#include "tests/kernels/device_stream.h"

namespace normscope::testing {
namespace {

using ::testing::Each;
using ::testing::IsNan;

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

class SumsOnADevice : public ::testing::TestWithParam<int> {
 protected:
  using Body = std::function<void(Communicator& ranks, const DeviceStream& stream)>;

  static void run(const Body& body) {
    run_as_threads_on_device(GetParam(), {}, [&](Communicator& ranks) {
      const DeviceStream stream;
      body(ranks, stream);
    });
  }
};

TEST_P(SumsOnADevice, FollowEachOtherWithoutWaitingForTheHost) {
  constexpr int kSums = 300;
  run([](Communicator& ranks, const DeviceStream& stream) {
    std::vector<std::vector<double>> sums;
    for (int sum = 0; sum < kSums; ++sum) sums.push_back(values_of(ranks.rank(), sum));

    for (std::vector<double>& values : sums) ranks.all_reduce_sum(values, stream.get());

    stream.wait();
    for (int sum = 0; sum < kSums; ++sum) {
      ASSERT_EQ(sums[static_cast<std::size_t>(sum)], total_of(ranks.size(), sum)) << sum;
    }
  });
}

// Rank 0 queues all of its graphs, whether or not its peers have come.
TEST_P(SumsOnADevice, OfGraphsMeetThoseOfEagerRanks) {
  constexpr int kReplays = 20;
  run([](Communicator& ranks, const DeviceStream& stream) {
    std::vector<double> first(70, 1.0);
    std::vector<double> second(5, 3.0);
    const auto queue_sums = [&] {
      ranks.all_reduce_sum(first, stream.get());
      ranks.all_reduce_sum(second, stream.get());
    };
    const std::function<void()> replay = stream.capture(queue_sums);
    const bool uses_graph = ranks.rank() % 2 == 0;
    (void)exchanged_sum_of_ranks(ranks);  // all have captured: that may wait for the device

    for (int i = 0; i < kReplays; ++i) uses_graph ? replay() : queue_sums();

    stream.wait();
    double total = 1.0;  // at most 4^20, which is exact
    for (int i = 0; i < kReplays; ++i) total *= ranks.size();
    EXPECT_THAT(first, Each(total));
    EXPECT_THAT(second, Each(3.0 * total));
    (void)exchanged_sum_of_ranks(ranks);  // graphs are destroyed when no kernel waits
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, SumsOnADevice, ::testing::Values(1, 2, 3, 4),
                         ::testing::PrintToStringParamName());

void expect_nan(Communicator& ranks, const DeviceStream& stream) {
  std::vector<double> values(70, 1.0);

  ranks.all_reduce_sum(values, stream.get());

  stream.wait();
  EXPECT_THAT(values, Each(IsNan()));
}

std::string failure_of(Communicator& ranks, const DeviceStream& stream) {
  double value = 1.0;
  return text_of<CommunicationError>([&] { ranks.all_reduce_sum({&value, 1}, stream.get()); });
}

class FaultsOfSumsOnADevice : public SumsOnADevice {};

TEST_P(FaultsOfSumsOnADevice, DifferentLengthsGiveNaNAndTheNextSumIsRight) {
  run([](Communicator& ranks, const DeviceStream& stream) {
    std::vector<double> values(is_last(ranks) ? 71 : 70, 1.0);
    double next = 1.0;

    ranks.all_reduce_sum(values, stream.get());
    ranks.all_reduce_sum({&next, 1}, stream.get());

    stream.wait();
    EXPECT_THAT(values, Each(IsNan()));
    EXPECT_EQ(next, ranks.size());
  });
}

TEST_P(FaultsOfSumsOnADevice, ARankThatLeavesGivesNaNOrAnError) {
  run([](Communicator& ranks, const DeviceStream& stream) {
    if (ranks.rank() == 0) return;
    try {
      expect_nan(ranks, stream);
    } catch (const CommunicationError&) {  // NOLINT(bugprone-empty-catch)
    }
    EXPECT_EQ(failure_of(ranks, stream),
              "device: rank 0 of " + std::to_string(ranks.size()) + " has left");
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, FaultsOfSumsOnADevice, ::testing::Values(2, 3, 4),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace normscope::testing
