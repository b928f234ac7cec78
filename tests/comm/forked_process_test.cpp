// SPDX-License-Identifier: Apache-2.0
//
// A process that is forked from a rank cannot affect the rank's group.
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "normscope/core/error.h"
#include "tests/comm/worlds.h"
#include "tests/support/ranks.h"

namespace normscope::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace std::chrono_literals;

// Runs `body` in a fork of this process and waits until it ends.
void run_in_fork(const std::function<void()>& body) {
  const std::vector<RankFailure> failures = failures_of_processes(1, [&](int) { body(); });
  for (const RankFailure& failure : failures) ADD_FAILURE() << "the fork: " << failure.reason;
}

class ForkedProcessTest : public ::testing::TestWithParam<World> {
 protected:
  // Rank 1 forks between two exchanges. The group must stay usable.
  static void run(const std::function<void(std::unique_ptr<Communicator>&)>& in_fork) {
    GetParam().run(GetParam().ranks, {.time_limit = 60s}, [&](Communicator& communicator) {
      EXPECT_EQ(exchanged_sum_of_ranks(communicator), sum_of_ranks(communicator));
      if (communicator.rank() == 1) {
        run_in_fork([&] {
          std::unique_ptr<Communicator> copy(&communicator);
          in_fork(copy);
          [[maybe_unused]] const Communicator* owned_by_the_world = copy.release();
        });
      }
      for (int i = 0; i < 3; ++i) {
        EXPECT_EQ(exchanged_sum_of_ranks(communicator), sum_of_ranks(communicator));
      }
    });
  }
};

TEST_P(ForkedProcessTest, CannotExchangeInPlaceOfItsRank) {
  run([](std::unique_ptr<Communicator>& communicator) {
    std::vector<double> values{1e9};

    const std::string text =
        text_of<CommunicationError>([&] { communicator->all_reduce_sum(values); });

    EXPECT_THAT(text, AllOf(StartsWith(std::string(communicator->transport()) + ": this process (" +
                                       std::to_string(getpid()) + ") was forked from rank 1 of " +
                                       std::to_string(communicator->size())),
                            HasSubstr("(process " + std::to_string(getppid()) + ")"),
                            HasSubstr("scope local")));
    EXPECT_THAT(values, ElementsAre(1e9));
  });
}

TEST_P(ForkedProcessTest, CannotSplitItsRanksGroup) {
  run([](std::unique_ptr<Communicator>& communicator) {
    EXPECT_THAT(text_of<CommunicationError>([&] { (void)communicator->split(0, 0); }),
                HasSubstr("was forked from rank 1"));
  });
}

TEST_P(ForkedProcessTest, DoesNotMarkItsRanksGroupAsFailed) {
  run([](std::unique_ptr<Communicator>& communicator) { communicator->fail("out of memory"); });
}

TEST_P(ForkedProcessTest, DoesNotTakeItsRankOutOfTheGroup) {
  run([](std::unique_ptr<Communicator>& communicator) { communicator.reset(); });
}

INSTANTIATE_TEST_SUITE_P(SharedMemory, ForkedProcessTest, worlds({2, 3}, run_as_processes),
                         ranks_of);

}  // namespace
}  // namespace normscope::testing
