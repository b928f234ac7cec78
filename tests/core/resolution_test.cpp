// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/resolution.h"

#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "normscope/core/error.h"
#include "tests/support/text_of.h"

namespace normscope {
namespace {

using Leaders = std::vector<int>;
using Hosts = std::vector<std::int64_t>;

Leaders leaders(const std::string& scope, const Hosts& host_of_rank) {
  return leaders_of(Scope::parse(scope), host_of_rank);
}

TEST(ResolutionTest, WorldIsAllRanksAndLocalIsEachForItself) {
  EXPECT_EQ(leaders("world", {5, 5, 6}), (Leaders{0, 0, 0}));
  EXPECT_EQ(leaders("local", {5, 5, 6}), (Leaders{0, 1, 2}));
  EXPECT_EQ(leaders("slices:4", {5, 5, 6}), (Leaders{0, 1, 2}));
}

TEST(ResolutionTest, GroupsAreConsecutiveAndTheLastMayBeSmaller) {
  const Hosts one_host(5, 0);

  EXPECT_EQ(leaders("group:1", one_host), (Leaders{0, 1, 2, 3, 4}));
  EXPECT_EQ(leaders("group:2", one_host), (Leaders{0, 0, 2, 2, 4}));
  EXPECT_EQ(leaders("group:3", one_host), (Leaders{0, 0, 0, 3, 3}));
  EXPECT_EQ(leaders("group:5", one_host), (Leaders{0, 0, 0, 0, 0}));
}

TEST(ResolutionTest, ANodeIsTheRanksOfOneHostWhateverTheirOrder) {
  EXPECT_EQ(leaders("node", {7, 7, 7}), (Leaders{0, 0, 0}));
  EXPECT_EQ(leaders("node", {7, -9, 7, 8, -9}), (Leaders{0, 1, 0, 3, 1}));
}

TEST(ResolutionTest, ARankInNoSetIsAlone) {
  EXPECT_EQ(leaders("ranks:3,1/4,0", Hosts(6, 0)), (Leaders{0, 1, 2, 1, 0, 5}));
}

TEST(ResolutionTest, OneRankSharesWithItselfWhateverTheScope) {
  for (const std::string scope : {"world", "local", "group:4", "node", "ranks:2,3"}) {
    EXPECT_EQ(leaders(scope, {7}), Leaders{0}) << scope;
  }
}

std::string refusal_of(const std::string& scope, std::size_t ranks) {
  return testing::text_of<ArgumentError>([&] { (void)leaders(scope, Hosts(ranks, 0)); });
}

TEST(ResolutionTest, ScopesThatDoNotFitTheRanksAreRefusedByName) {
  EXPECT_EQ(refusal_of("group:8", 4),
            "scope: group:8: expected at most the 4 ranks there are, got 8");
  EXPECT_EQ(refusal_of("group:9223372036854775807", 2),
            "scope: group:9223372036854775807: expected at most the 2 ranks there are, got "
            "9223372036854775807");
  EXPECT_EQ(refusal_of("ranks:0,1/9,2", 4), "scope: ranks:0,1/9,2: expected ranks below 4, got 9");
  EXPECT_EQ(refusal_of("ranks:4", 4), "scope: ranks:4: expected ranks below 4, got 4");
  EXPECT_EQ(refusal_of("norm_batch:8", 4),
            "scope: expected a scope resolved by resolve_norm_batch, got norm_batch:8");
}

std::string resolved(std::int64_t wanted, std::int64_t samples, std::int64_t ranks) {
  return resolve_norm_batch(Scope::norm_batch(wanted), samples, ranks).str();
}

TEST(ResolutionTest, ANormBatchThatFitsTwiceIsSlicedAndOnceIsLocal) {
  EXPECT_EQ(resolved(4, 16, 4), "slices:4");
  EXPECT_EQ(resolved(4, 15, 4), "slices:3");
  EXPECT_EQ(resolved(4, 8, 4), "slices:2");
  EXPECT_EQ(resolved(4, 7, 4), "local");
  EXPECT_EQ(resolved(4, 4, 1), "local");
  EXPECT_EQ(resolved(1, 1, 4), "local");
}

TEST(ResolutionTest, ALargerNormBatchIsTheSmallestGroupThatHasIt) {
  EXPECT_EQ(resolved(4, 3, 8), "group:2");
  EXPECT_EQ(resolved(4, 2, 8), "group:2");
  EXPECT_EQ(resolved(5, 2, 8), "group:3");
  EXPECT_EQ(resolved(7, 1, 8), "group:7");
}

TEST(ResolutionTest, ANormBatchThatNoGroupHasIsTheWorld) {
  EXPECT_EQ(resolved(8, 1, 8), "world");
  EXPECT_EQ(resolved(9, 1, 8), "world");
  EXPECT_EQ(resolved(4, 1, 1), "world");
  EXPECT_EQ(resolved(4, 0, 8), "world");
  EXPECT_EQ(resolved(std::numeric_limits<std::int64_t>::max(), 1, 8), "world");
}

TEST(ResolutionTest, OtherScopesAreNotTouchedByTheSamples) {
  for (const std::string scope : {"world", "slices:3", "ranks:0,1"}) {
    EXPECT_EQ(resolve_norm_batch(Scope::parse(scope), 64, 2).str(), scope);
  }
}

}  // namespace
}  // namespace normscope
