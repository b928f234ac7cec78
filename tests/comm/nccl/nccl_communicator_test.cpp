// SPDX-License-Identifier: Apache-2.0
//
// The communicator over NCCL, with an implementation of NCCL on the host: no GPU is needed.
#include "normscope/comm/nccl/nccl_communicator.h"

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/comm/thread_communicator.h"
#include "normscope/core/error.h"
#include "tests/comm/communicator_contract.h"
#include "tests/comm/nccl/nccl_on_host.h"
#include "tests/comm/worlds.h"
#include "tests/support/ranks.h"

namespace normscope::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::Le;
using namespace std::chrono_literals;

class Nccl : public ::testing::TestWithParam<int> {
 protected:
  static void run(const CommunicatorBody& body, std::chrono::milliseconds time_limit = kAmple) {
    auto meetings = make_thread_communicators(GetParam());
    spawn_threads(GetParam(), [&](int rank) {
      const auto communicator =
          make_nccl_communicator(*meetings[static_cast<std::size_t>(rank)], time_limit);
      body(*communicator);
    });
    EXPECT_EQ(nccl_on_host::living_communicators(), 0);
  }
};

class NcclPeers : public Nccl {
 protected:
  // Only rank 0 runs `body`: its exchanges wait for the others until the time limit of 100 ms.
  static void run_without_peers(const CommunicatorBody& body) {
    PipeGate done;
    run(
        [&](Communicator& communicator) {
          if (communicator.rank() != 0) {
            done.wait();
            return;
          }
          body(communicator);
          done.open_for(GetParam() - 1);
        },
        100ms);
  }
};

TEST_P(Nccl, SumsInHostMemory) {
  run([](Communicator& communicator) {
    EXPECT_EQ(communicator.size(), GetParam());
    EXPECT_EQ(communicator.transport(), "nccl");
    for (const std::size_t length : {0, 1, 7, 1000}) {
      std::vector<double> values(length, communicator.rank() + 1.0);

      communicator.all_reduce_sum(values);

      EXPECT_EQ(values, std::vector<double>(length, sum_of_ranks(communicator) + GetParam()));
    }
  });
}

TEST_P(Nccl, SumsInDeviceMemoryInStreamOrderWithoutWaiting) {
  PipeGate gate;
  run([&](Communicator& communicator) {
    nccl_on_host::Stream stream;
    std::vector<double> values{communicator.rank() + 1.0};
    stream.wait_at(gate);

    // If a call waited, the gate would never open.
    for (int i = 0; i < 3; ++i) {
      communicator.all_reduce_sum(values, {.handle = stream.get(), .memory = Memory::kDevice});
    }
    gate.open_for(1);
    cudaStreamSynchronize(stream.get());

    const double once = sum_of_ranks(communicator) + GetParam();
    EXPECT_THAT(values, ElementsAre(once * GetParam() * GetParam()));
  });
}

TEST_P(Nccl, SplitsIntoPartsThatSumAmongThemselves) {
  run([](Communicator& communicator) {
    const int color = communicator.rank() % 2 == 0 ? -3 : 5;

    const auto part = communicator.split(color, /*key=*/-communicator.rank());
    const auto alone = communicator.split(communicator.rank(), 0);

    EXPECT_EQ(part->size(), (GetParam() + (color == -3 ? 1 : 0)) / 2);
    EXPECT_EQ(part->rank(), part->size() - 1 - communicator.rank() / 2);
    EXPECT_EQ(exchanged_sum_of_ranks(*part), sum_of_ranks(*part));
    EXPECT_EQ(alone->size(), 1);
    EXPECT_EQ(exchanged_sum_of_ranks(communicator), sum_of_ranks(communicator));
  });
}

TEST_P(Nccl, UsesADuplicateOfTheCallersCommunicator) {
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  spawn_threads(GetParam(), [&](int rank) {
    ncclComm_t given = nullptr;
    ncclCommInitRankConfig(&given, GetParam(), id, rank, nullptr);
    {
      const auto communicator = make_nccl_communicator(given);

      EXPECT_EQ(communicator->rank(), rank);
      EXPECT_EQ(exchanged_sum_of_ranks(*communicator), sum_of_ranks(*communicator));
    }
    ncclCommDestroy(given);
  });
  EXPECT_EQ(nccl_on_host::living_communicators(), 0);
}

TEST_P(Nccl, HasFewChannelsAndSoDoItsParts) {
  constexpr int kFew = 4;
  static_cast<void>(nccl_on_host::most_channels_since_last_call());
  run([](Communicator& communicator) { (void)communicator.split(communicator.rank() / 2, 0); });

  EXPECT_THAT(nccl_on_host::most_channels_since_last_call(), AllOf(Ge(1), Le(kFew)));
}

TEST_P(Nccl, RepeatsTheFirstFailure) {
  run([](Communicator& communicator) {
    communicator.fail("the weights are missing");
    communicator.fail("another reason");

    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(text_of<CommunicationError>([&] { communicator.all_reduce_sum({}); }),
                "nccl: rank " + std::to_string(communicator.rank()) + " of " +
                    std::to_string(GetParam()) + ": failed: the weights are missing");
    }
  });
}

TEST_P(Nccl, ThrowsWhatNcclReportsLater) {
  run([](Communicator& communicator) {
    PipeGate never;
    nccl_on_host::Stream stream;
    std::vector<double> values{1.0};
    stream.wait_at(never);
    communicator.all_reduce_sum(values, {.handle = stream.get(), .memory = Memory::kDevice});

    nccl_on_host::report(ncclRemoteError);

    std::string text;
    while (text.empty()) {
      try {
        communicator.all_reduce_sum(values, {.handle = stream.get(), .memory = Memory::kDevice});
      } catch (const CommunicationError& error) {
        text = error.what();
      }
    }
    EXPECT_THAT(text, HasSubstr(": ncclAllReduce: remote process exited"));
    never.open_for(1);
    cudaStreamSynchronize(stream.get());
  });
}

TEST_P(Nccl, DoesNotReachTheLongestTimeLimit) {
  run(
      [](Communicator& communicator) {
        if (communicator.rank() == 0) std::this_thread::sleep_for(20ms);
        EXPECT_EQ(exchanged_sum_of_ranks(communicator), sum_of_ranks(communicator));
      },
      std::chrono::milliseconds::max());
}

TEST_P(Nccl, HasNoTimeLimitForCapturedSums) {
  run(
      [](Communicator& communicator) {
        nccl_on_host::Stream stream;
        std::vector<double> values{1.0};
        stream.capture();

        communicator.all_reduce_sum(values, {.handle = stream.get(), .memory = Memory::kDevice});
        std::this_thread::sleep_for(1200ms);  // beyond the limit

        EXPECT_EQ(exchanged_sum_of_ranks(communicator), sum_of_ranks(communicator));
      },
      1s);
}

TEST_P(NcclPeers, AbortsASumWhileAThreadCapturesAnotherStream) {
  run_without_peers([](Communicator& communicator) {
    nccl_on_host::Stream watched;
    nccl_on_host::Stream captured;
    std::vector<double> values{1.0};
    communicator.all_reduce_sum(values, {.handle = watched.get(), .memory = Memory::kDevice});
    captured.capture();

    cudaStreamSynchronize(watched.get());

    EXPECT_TRUE(captured.capture_is_valid());
  });
}

TEST_P(NcclPeers, AbortsASumOnADeviceAtItsTimeLimit) {
  run_without_peers([](Communicator& communicator) {
    nccl_on_host::Stream stream;
    std::vector<double> values{1.0};
    communicator.all_reduce_sum(values, {.handle = stream.get(), .memory = Memory::kDevice});

    // Ends although no peer ever arrives: the watch has aborted the sum.
    cudaStreamSynchronize(stream.get());

    EXPECT_THAT(text_of<TimeoutError>([&] { communicator.all_reduce_sum(values); }),
                HasSubstr("rank 0 of " + std::to_string(GetParam()) +
                          ": ncclAllReduce: waited 0.1 s for the other ranks"));
  });
}

TEST_P(NcclPeers, AWaitOnTheHostEndsAtItsTimeLimit) {
  run_without_peers([](Communicator& communicator) {
    std::vector<double> values{1.0};
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(text_of<TimeoutError>([&] { communicator.all_reduce_sum(values); }),
                  HasSubstr("waited 0.1 s for the other ranks"));
    }
  });
}

TEST(NcclCommunicator, RefusesANullPointer) {
  EXPECT_EQ(
      text_of<ArgumentError>([] { (void)make_nccl_communicator(static_cast<ncclComm*>(nullptr)); }),
      "ranks: expected an NCCL communicator, got a null pointer");
}

const auto kRanks = [](const ::testing::TestParamInfo<int>& ranks) {
  return std::to_string(ranks.param);
};
INSTANTIATE_TEST_SUITE_P(OnHost, Nccl, ::testing::Values(1, 2, 3), kRanks);
INSTANTIATE_TEST_SUITE_P(OnHost, NcclPeers, ::testing::Values(2, 3), kRanks);

}  // namespace
}  // namespace normscope::testing
