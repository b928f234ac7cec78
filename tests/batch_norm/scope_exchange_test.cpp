// SPDX-License-Identifier: Apache-2.0
//
// Ranks that find out together how a scope divides them.
#include "normscope/batch_norm/scope_exchange.h"

#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/core/error.h"
#include "tests/batch_norm/layer_run.h"
#include "tests/comm/worlds.h"

namespace normscope::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class ScopeExchange : public ::testing::TestWithParam<World> {
 protected:
  static void run(const std::function<void(Exchange&)>& body) {
    GetParam().run(GetParam().ranks, {}, [&](Communicator& communicator) {
      Exchange exchange = exchange_over(communicator);
      body(exchange);
    });
  }
};

TEST_P(ScopeExchange, RanksOfOneLeaderMeetEachOtherOnly) {
  run([](Exchange& group) {
    const std::vector<int> leaders = agree_on_leaders(group, Scope::group(2), "stem");

    const std::unique_ptr<Exchange> part = make_part_of(group, leaders);

    const int rank = group.communicator().rank();
    const int expected = rank == 4 ? 1 : 2;
    EXPECT_EQ(leaders, (std::vector<int>{0, 0, 2, 2, 4}));
    ASSERT_EQ(part == nullptr, expected == 1);
    if (!part) return;
    EXPECT_EQ(part->communicator().size(), expected);
    EXPECT_EQ(part->communicator().rank(), rank % 2);
    EXPECT_EQ(gather(part->communicator(), rank)[0], rank - rank % 2);
  });
}

TEST_P(ScopeExchange, ProcessesOfThisHostAreOneNode) {
  run([](Exchange& group) {
    EXPECT_EQ(agree_on_leaders(group, Scope::node(), "stem"), (std::vector<int>(5, 0)));
  });
}

TEST_P(ScopeExchange, TheLargestBatchIsNominal) {
  run([](Exchange& group) {
    const int rank = group.communicator().rank();

    EXPECT_EQ(agree_on_norm_batch(group, Scope::norm_batch(7), "stem", rank), Scope::group(2));
    EXPECT_EQ(agree_on_norm_batch(group, Scope::norm_batch(7), "stem", 0), std::nullopt);
  });
}

TEST_P(ScopeExchange, EachRankLearnsTheSamplesOfAllInTheirOrder) {
  run([](Exchange& group) {
    const int rank = group.communicator().rank();

    EXPECT_EQ(gather_samples(group, rank - 2), (std::vector<std::int64_t>{-2, -1, 0, 1, 2}));
    constexpr std::int64_t kMany = std::int64_t{1} << 50;
    EXPECT_EQ(gather_samples(group, kMany + rank)[4], kMany + 4);
  });
}

TEST_P(ScopeExchange, ARankThatIsInALayerMeanwhileIsNamed) {
  run([](Exchange& group) {
    const int rank = group.communicator().rank();

    const std::string text = text_of<MismatchError>([&] {
      if (rank == 1) {
        (void)agree_on_norm_batch(group, Scope::norm_batch(7), "stem", rank);
      } else {
        (void)gather_samples(group, rank);
      }
    });

    EXPECT_THAT(text, AllOf(HasSubstr("rank 0: the next step of joined batches"),
                            HasSubstr("rank 1: first use of scope norm_batch:7 by stem")));
  });
}

TEST_P(ScopeExchange, AScopeThatDoesNotFitIsRefusedOnEveryRankAndTheGroupStaysUsable) {
  run([](Exchange& group) {
    const std::string text =
        text_of<ArgumentError>([&] { (void)agree_on_leaders(group, Scope::group(6), "stem"); });

    EXPECT_EQ(text, "scope: group:6: expected at most the 5 ranks there are, got 6");
    EXPECT_EQ(agree_on_leaders(group, Scope::world(), "stem"), (std::vector<int>(5, 0)));
  });
}

TEST_P(ScopeExchange, RanksThatUseDifferentScopesAllLearnWhichOnes) {
  run([](Exchange& group) {
    const Scope scope = group.communicator().rank() == 3 ? Scope::group(3) : Scope::group(2);

    const std::string text =
        text_of<MismatchError>([&] { (void)agree_on_leaders(group, scope, "stem"); });

    EXPECT_THAT(text, AllOf(HasSubstr("rank 2: first use of scope group:2 by stem"),
                            HasSubstr("rank 3: first use of scope group:3 by stem")));
  });
}

TEST_P(ScopeExchange, ErrorsCallTheRanksOfAPartAsTheGroupDoes) {
  run([](Exchange& group) {
    const int rank = group.communicator().rank();
    const std::unique_ptr<Exchange> part = make_part_of(group, {0, 0, 0, 3, 3});
    const std::string layer = "layer" + std::to_string(rank);
    std::vector<double> message(kHeaderSize);

    const std::string text = text_of<MismatchError>([&] {
      part->all_reduce({.layer = layer, .scope = "group:3", .channels = 2}, message, {});
    });

    EXPECT_THAT(text, HasSubstr("rank " + std::to_string(rank) + ": forward of " + layer));
    EXPECT_EQ(text.find("rank 0: ") == std::string::npos, rank >= 3);
  });
}

INSTANTIATE_TEST_SUITE_P(Threads, ScopeExchange, worlds({5}, &run_as_threads), ranks_of);
INSTANTIATE_TEST_SUITE_P(Processes, ScopeExchange, worlds({5}, &run_as_processes), ranks_of);

}  // namespace
}  // namespace normscope::testing
