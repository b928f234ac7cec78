// SPDX-License-Identifier: Apache-2.0
//
// Ranks whose kernels exchange sums and wait for each other. shared_device_test.cpp tests them as
// layers use them.
#include "tests/comm/on_device/device_communicator.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include <gtest/gtest.h>

#include "normscope/core/cache_lines.h"
#include "normscope/kernels/device_kernels.h"
#include "tests/kernels/device_stream.h"
#include "tests/kernels/kernels_under_test.h"
#include "tests/support/tensor.h"

namespace normscope::testing {
namespace {

using namespace std::chrono_literals;

constexpr std::int64_t kPositions = 3;

// Of a channel's elements on a rank, which are equal.
double value_of(int rank, int number, std::int64_t c) {
  return (1 + number + static_cast<double>(c)) * (rank % 2 == 0 ? 64.0 : -7.0);
}

// A rank's part of a norm batch, in which it exchanges the moments. Channels-last: blocks have few
// threads, which take long under ThreadSanitizer.
class Part {
 public:
  // Channels around the number that a block has; `number` is that of the exchange.
  Part(const Communicator& ranks, int number)
      : rank_(ranks.rank()),
        ranks_(ranks.size()),
        number_(number),
        channels_(1 + number * 37 % 45),
        x_(DType::kFloat64, Layout::kChannelsLast, 1, channels_, kPositions),
        statistics_(static_cast<std::size_t>(3 * channels_)),
        coefficients_(static_cast<std::size_t>(Coefficients::kNormalize * channels_)),
        totals_(static_cast<std::size_t>(limbs_size(channels_) + kHeaderSize)) {
    x_.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
      x_.set(n, c, p, value_of(rank_, number_, c));
    });
  }

  void exchange(Stream stream, double* scratch, const PeerMemory& peers) {
    const TensorView x = x_.view().read_only();
    const MessageView message{totals_.data(), channels_};
    NormBatches batches = norm_batches(x, 1);
    batches.totals = message.header();
    batches.ranks = ranks_;
    device_kernels_under_test().exchange_moments(
        stream, x, {scratch, channels_, 1},
        {.batches = batches,
         .statistics = statistics_.data(),
         .coefficients = {coefficients_.data()}},
        {}, message, {{static_cast<double>(kPositions), 5.0, 25.0, 0.0}}, peers);
  }

  void expect_mean_of_all_ranks() const {
    for (std::int64_t c = 0; c < channels_; ++c) {
      double total = 0.0;
      for (int rank = 0; rank < ranks_; ++rank) total += value_of(rank, number_, c);
      ASSERT_EQ(statistics_[static_cast<std::size_t>(c)], total / ranks_)
          << "channel " << c << " of exchange " << number_;
    }
  }

 private:
  int rank_;
  int ranks_;
  int number_;
  std::int64_t channels_;
  Tensor x_;
  std::vector<double> statistics_;
  AlignedVector<double> coefficients_;
  std::vector<double> totals_;
};

class ExchangesOnADevice : public ::testing::TestWithParam<int> {};

TEST_P(ExchangesOnADevice, FollowEachOtherWithoutWaitingForTheHost) {
  constexpr int kExchanges = 60;
  run_as_threads_on_device(GetParam(), {.time_limit = 20s}, [](Communicator& ranks) {
    const DeviceStream stream;
    std::vector<double> scratch(static_cast<std::size_t>(device_scratch_size(kMostChannels, 1)));
    std::deque<Part> parts;
    for (int number = 0; number < kExchanges; ++number) parts.emplace_back(ranks, number);

    for (Part& part : parts) {
      part.exchange(stream.get(), scratch.data(), *ranks.peer_memory(1, stream.get()));
    }

    stream.wait();
    for (const Part& part : parts) part.expect_mean_of_all_ranks();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ExchangesOnADevice, ::testing::Values(1, 2, 3, 4),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace normscope::testing
