// SPDX-License-Identifier: Apache-2.0
//
// The lengths of the all-reduces by which messages in host memory cross a process group of torch.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "normscope/core/error.h"
#include "normscope/torch/c10d/communicator.h"
#include "normscope/torch/c10d/expected_lengths.h"
#include "tests/support/ranks.h"
#include "tests/torch/store_backend.h"

namespace normscope::testing {
namespace {

using binding::C10dCommunicator;
using ::testing::ElementsAre;

// Notes the length of each all-reduce.
class NotingBackend final : public StoreBackend {
 public:
  using StoreBackend::StoreBackend;

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    lengths.push_back(tensors.front().numel());
    return StoreBackend::allreduce(tensors, options);
  }

  std::vector<std::int64_t> lengths;
};

constexpr int kRanks = 2;

void run_ranks(const std::function<void(C10dCommunicator&, NotingBackend&)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  spawn_threads(kRanks, [&](int rank) {
    const auto backend = c10::make_intrusive<NotingBackend>(store, rank, kRanks);
    const auto group = group_over(backend, store);
    C10dCommunicator communicator(group);
    body(communicator, *backend);
  });
}

// Sums the numbers from 0 on, times one more than the rank.
void expect_sums(C10dCommunicator& communicator, const std::vector<std::size_t>& lengths) {
  for (const std::size_t length : lengths) {
    std::vector<double> values(length);
    for (std::size_t i = 0; i < length; ++i) {
      values[i] = (communicator.rank() + 1.0) * static_cast<double>(i);
    }
    communicator.all_reduce_sum(values);
    for (std::size_t i = 0; i < length; ++i) ASSERT_EQ(values[i], 3.0 * static_cast<double>(i));
  }
}

TEST(Frames, AreLongEnoughForTheMessagesOfEarlierSteps) {
  run_ranks([](C10dCommunicator& communicator, NotingBackend& backend) {
    // Several lengths before a message tell its place.
    const std::vector<std::size_t> step = {12, 12, 5000, 12, 12, 60, 0, 126, 127};

    expect_sums(communicator, step);
    EXPECT_THAT(backend.lengths,
                ElementsAre(4096, 4096, 4096, 5000 - 4094, 4096, 4096, 4096, 4096, 4096, 4096));
    expect_sums(communicator, step);
    expect_sums(communicator, step);
    backend.lengths.clear();
    expect_sums(communicator, step);

    EXPECT_THAT(backend.lengths, ElementsAre(128, 128, 5120, 128, 128, 128, 128, 128, 256));
  });
}

TEST(Frames, TheRestOfALongerMessageThanExpectedFollows) {
  run_ranks([](C10dCommunicator& communicator, NotingBackend& backend) {
    expect_sums(communicator, std::vector<std::size_t>(20, 12));
    backend.lengths.clear();

    expect_sums(communicator, {5000});

    EXPECT_THAT(backend.lengths, ElementsAre(128, 5000 - 126));
  });
}

TEST(Frames, AreAtMostTwoMebibytes) {
  run_ranks([](C10dCommunicator& communicator, NotingBackend& backend) {
    constexpr std::int64_t kLength = 300'000;
    expect_sums(communicator, std::vector<std::size_t>(20, kLength));
    backend.lengths.clear();

    expect_sums(communicator, {kLength});

    EXPECT_THAT(backend.lengths, ElementsAre(1 << 18, kLength - (1 << 18) + 2));
  });
}

// After an error, a rank may be at another place of its program than its peers.
TEST(Frames, AreThoseOfUnexpectedMessagesAfterRanksCameWithDifferentLengths) {
  run_ranks([](C10dCommunicator& communicator, NotingBackend& backend) {
    expect_sums(communicator, std::vector<std::size_t>(20, 12));
    std::vector<double> values(communicator.rank() == 0 ? 12 : 5000);

    EXPECT_THROW(communicator.all_reduce_sum(values), MismatchError);
    backend.lengths.clear();
    expect_sums(communicator, {12});

    EXPECT_THAT(backend.lengths, ElementsAre(4096));
  });
}

TEST(ExpectedLengths, OfMessagesThatNeverRepeatDoNotFillTheMemory) {
  constexpr std::size_t kMany = (1 << 20) + 100;
  binding::ExpectedLengths lengths;
  for (std::size_t length = 0; length < kMany; ++length) lengths.add(length);

  // The first lengths have been forgotten, the last ones have not.
  for (std::size_t length = 0; length < 9; ++length) lengths.add(length);
  EXPECT_EQ(lengths.next(), std::nullopt);
  for (std::size_t length = kMany - 9; length < kMany - 1; ++length) lengths.add(length);
  EXPECT_EQ(lengths.next(), kMany - 1);
}

}  // namespace
}  // namespace normscope::testing
