// SPDX-License-Identifier: Apache-2.0
//
// The contract of every communicator.
#include "tests/comm/communicator_contract.h"

#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/comm/describe.h"
#include "normscope/core/error.h"
#include "tests/comm/worlds.h"
#include "tests/support/interrupting.h"
#include "tests/support/ranks.h"

namespace normscope::testing {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace std::chrono_literals;

TEST_P(CommunicatorContract, RanksCountFromZeroToSize) {
  run([](Communicator& communicator) {
    EXPECT_EQ(communicator.size(), GetParam().ranks);
    EXPECT_EQ(exchanged_sum_of_ranks(communicator), sum_of_ranks(communicator));
  });
}

TEST_P(CommunicatorContract, SumsInPlaceAtLengthsAroundASlot) {
  run([](Communicator& communicator) {
    for (const std::int64_t length :
         {std::int64_t{0}, std::int64_t{1}, std::int64_t{7}, kSlotLength - 1, kSlotLength,
          kSlotLength + 1, 2 * kSlotLength, 3 * kSlotLength + 5}) {
      std::vector<double> values;
      std::vector<double> expected;
      for (std::int64_t i = 0; i < length; ++i) {
        values.push_back(static_cast<double>(i + communicator.rank()));
        expected.push_back(static_cast<double>(i * communicator.size()) +
                           sum_of_ranks(communicator));
      }

      communicator.all_reduce_sum(values);

      EXPECT_EQ(values, expected) << "length " << length;
    }
  });
}

TEST_P(CommunicatorContract, RanksAgreeBitwise) {
  run([](Communicator& communicator) {
    // Summands of very different magnitude: another order of additions changes the bits.
    std::vector<double> values;
    for (int i = 0; i < 3 * kSlotLength + 5; ++i) {
      values.push_back(
          std::ldexp(1.0 / (3 + i + 7 * communicator.rank()), (i + communicator.rank()) * 13 % 60));
    }

    communicator.all_reduce_sum(values);

    for (const double value : values) {
      const auto bits = std::bit_cast<std::uint64_t>(value);
      const auto high = static_cast<double>(bits >> 32);
      const auto low = static_cast<double>(bits & 0xFFFFFFFF);
      EXPECT_THAT(gather(communicator, high), Each(high));
      EXPECT_THAT(gather(communicator, low), Each(low));
    }
  });
}

TEST_P(CommunicatorContract, GathersARowFromEachRankInTheirOrder) {
  run([](Communicator& communicator) {
    const double rank = communicator.rank();

    const std::vector<double> rows = normscope::gather(communicator, {rank, rank * rank});

    ASSERT_EQ(std::ssize(rows), 2 * communicator.size());
    for (int row = 0; row < communicator.size(); ++row) {
      EXPECT_EQ(rows[2 * static_cast<std::size_t>(row)], row);
      EXPECT_EQ(rows[2 * static_cast<std::size_t>(row) + 1], row * row);
    }
  });
}

TEST_P(CommunicatorContract, NonFiniteValuesAreSummed) {
  run([](Communicator& communicator) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
    const bool last = communicator.rank() == communicator.size() - 1;
    std::vector<double> values{last ? kNaN : 1.0, last ? kInfinity : 1.0, 1.0};

    communicator.all_reduce_sum(values);

    EXPECT_TRUE(std::isnan(values[0]));
    EXPECT_EQ(values[1], kInfinity);
    EXPECT_EQ(values[2], communicator.size());
  });
}

TEST_P(CommunicatorContract, AThousandSumsInARowAreCorrect) {
  run([](Communicator& communicator) {
    // Crosses the wrap-around of epochs: in shared memory they start 256 exchanges before it.
    for (int i = 0; i < 1000; ++i) {
      std::vector<double> values{static_cast<double>(i), static_cast<double>(communicator.rank())};

      communicator.all_reduce_sum(values);

      ASSERT_THAT(values, ElementsAre(i * communicator.size(), sum_of_ranks(communicator)));
    }
  });
}

TEST_P(CommunicatorContract, ASplitHasTheRanksOfItsColorInTheOrderOfTheirKeys) {
  run([](Communicator& communicator) {
    const int rank = communicator.rank();

    const auto alone = communicator.split(/*color=*/rank, /*key=*/0);
    const auto reversed = communicator.split(/*color=*/-3, /*key=*/-rank);
    const auto same = communicator.split(/*color=*/0, /*key=*/7);

    EXPECT_EQ(alone->size(), 1);
    EXPECT_EQ(alone->rank(), 0);
    EXPECT_EQ(reversed->size(), communicator.size());
    EXPECT_EQ(reversed->rank(), communicator.size() - 1 - rank);
    EXPECT_EQ(same->rank(), rank);
    for (Communicator* part : {alone.get(), reversed.get(), same.get(), &communicator}) {
      EXPECT_EQ(exchanged_sum_of_ranks(*part), sum_of_ranks(*part));
    }
  });
}

TEST_P(CommunicatorContract, PartsOfASplitAndTheirPartsSumSeparately) {
  run([](Communicator& communicator) {
    const auto parity = communicator.split(communicator.rank() % 2, communicator.rank());
    const auto pair = parity->split(parity->rank() / 2, parity->rank());

    // The parts may make different numbers of exchanges without an effect on the whole group.
    for (int i = 0; i <= communicator.rank() % 2; ++i) {
      std::vector<double> values{static_cast<double>(communicator.rank() % 2), 1.0};
      parity->all_reduce_sum(values);
      EXPECT_THAT(values, ElementsAre(communicator.rank() % 2 * parity->size(), parity->size()));
    }
    EXPECT_LE(pair->size(), 2);
    EXPECT_EQ(exchanged_sum_of_ranks(*pair), sum_of_ranks(*pair));
    EXPECT_EQ(exchanged_sum_of_ranks(communicator), sum_of_ranks(communicator));
  });
}

TEST_P(CommunicatorContract, EveryCallAfterAFailureThrowsTheFirstReason) {
  run([](Communicator& communicator) {
    if (communicator.rank() == 0) communicator.fail("the weights are missing");
    const std::string first = text_of<CommunicationError>([&] { communicator.all_reduce_sum({}); });
    communicator.fail("another reason");

    const std::string second =
        text_of<CommunicationError>([&] { communicator.all_reduce_sum({}); });
    const std::string third = text_of<CommunicationError>([&] { (void)communicator.split(0, 0); });

    EXPECT_EQ(first, std::string(communicator.transport()) + ": rank 0 of " +
                         std::to_string(communicator.size()) + " failed: the weights are missing");
    EXPECT_EQ(second, first);
    EXPECT_EQ(third, first);
  });
}

TEST_P(CommunicatorContract, ALongReasonIsCutAndStillNamesTheRank) {
  run([](Communicator& communicator) {
    constexpr std::size_t kLongest = 1200;
    if (communicator.rank() == 0) communicator.fail(std::string(100'000, 'x'));

    const std::string text = text_of<CommunicationError>([&] { communicator.all_reduce_sum({}); });

    EXPECT_THAT(text,
                HasSubstr("rank 0 of " + std::to_string(communicator.size()) + " failed: xxx"));
    EXPECT_LE(text.size(), kLongest);
  });
}

TEST_P(PeersContract, EveryRankIsToldOfDifferentLengthsAndTheGroupStaysUsable) {
  run([](Communicator& communicator) {
    if (!communicator.compares_lengths()) return;
    const int last = communicator.size() - 1;
    // Against a length of 2: one with more pieces, an empty one, and one that also fits one piece.
    for (const std::size_t odd_length : {200, 0, 3}) {
      std::vector<double> values(communicator.rank() == last ? odd_length : 2);
      EXPECT_THAT(
          text_of<MismatchError>([&] { communicator.all_reduce_sum(values); }),
          AllOf(HasSubstr(" 2 from rank 0"),
                EndsWith(std::to_string(odd_length) + " from rank " + std::to_string(last))));
      EXPECT_EQ(exchanged_sum_of_ranks(communicator), sum_of_ranks(communicator));
    }
  });
}

TEST_P(PeersContract, DeviceMemoryIsRefusedAndTheGroupStaysUsable) {
  run([](Communicator& communicator) {
    std::vector<double> value{1.0};

    const std::string text = text_of<ArgumentError>(
        [&] { communicator.all_reduce_sum(value, {.memory = Memory::kDevice}); });

    EXPECT_THAT(text, EndsWith(": expected values in the host's memory, got a device's"));
    EXPECT_EQ(exchanged_sum_of_ranks(communicator), sum_of_ranks(communicator));
  });
}

TEST_P(PeersContract, AFailureEndsTheWaitOfPeers) {
  // With a time limit longer than that of the test: only the failure can end the wait.
  run(
      [](Communicator& communicator) {
        const auto sum = [&] {
          EXPECT_EQ(exchanged_sum_of_ranks(communicator), sum_of_ranks(communicator));
        };
        if (communicator.rank() == 1) {
          sum();
          std::this_thread::sleep_for(20ms);  // by then the peers wait, most likely asleep
          communicator.fail("out of memory");
        } else {
          // On a busy machine a peer may still be in the first sum when the failure reaches it.
          EXPECT_THAT(text_of<CommunicationError>([&] { sum(), sum(); }),
                      HasSubstr("rank 1 of " + std::to_string(communicator.size()) +
                                " failed: out of memory"));
        }
      },
      24h);
}

TEST_P(PeersContract, AnObserverMayEndAWait) {
  const std::unique_ptr<Gate> interrupted = GetParam().make_gate();
  run(
      [&](Communicator& communicator) {
        const auto sum = [&] { communicator.all_reduce_sum({}); };
        if (communicator.rank() != 0) {
          interrupted->wait();
          EXPECT_THAT(text_of<CommunicationError>(sum),
                      HasSubstr("rank 0 of " + std::to_string(communicator.size()) +
                                " was interrupted while it waited"));
          return;
        }
        {
          const Interrupting observer;
          EXPECT_THROW(sum(), std::domain_error);
        }
        interrupted->open_for(communicator.size() - 1);
      },
      24h);
}

TEST_P(PeersContract, TheLongestTimeLimitIsNotOver) {
  run(
      [](Communicator& communicator) {
        if (communicator.rank() == 0) std::this_thread::sleep_for(20ms);
        EXPECT_EQ(exchanged_sum_of_ranks(communicator), sum_of_ranks(communicator));
      },
      std::chrono::milliseconds::max());
}

TEST_P(PeersContract, AWaitEndsAtItsTimeLimitAndNamesTheMissingRanks) {
  const std::unique_ptr<Gate> timed_out = GetParam().make_gate();
  run(
      [&](Communicator& communicator) {
        if (communicator.rank() != 0) {
          timed_out->wait();
          EXPECT_THAT(text_of<CommunicationError>([&] { communicator.all_reduce_sum({}); }),
                      HasSubstr("rank 0 of"));
          return;
        }
        std::vector<int> missing = GetParam().peers_of_rank_0;
        for (int rank = 1; GetParam().peers_of_rank_0.empty() && rank < communicator.size();
             ++rank) {
          missing.push_back(rank);
        }
        EXPECT_THAT(text_of<TimeoutError>([&] { communicator.all_reduce_sum({}); }),
                    AllOf(StartsWith(std::string(communicator.transport()) + ": rank 0 of " +
                                     std::to_string(communicator.size()) + " waited "),
                          EndsWith(" s for " + list_of_ranks(missing))));
        timed_out->open_for(communicator.size() - 1);
      },
      300ms);  // also the limit for making the group, on a busy machine
}

}  // namespace
}  // namespace normscope::testing
