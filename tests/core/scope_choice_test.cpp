// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/scope_choice.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "normscope/core/error.h"
#include "tests/core/part_moments.h"
#include "tests/support/text_of.h"

namespace normscope::testing {
namespace {

using Hosts = std::vector<std::int64_t>;

// Parts of `values` values each.
PartMoments normal_parts(std::int64_t parts, std::int64_t values, std::int64_t batches = 16) {
  Random random(1);
  return moments_of(batches, parts, 64, independent_normal_values(random, values));
}

ScopeChoice choose(const std::vector<PartMoments>& calls, double wanted, const Hosts& hosts) {
  return choose_scope("bn1", calls, kEps, wanted, hosts);
}

std::string chosen(const ScopeChoice& choice) {
  return choice.candidates[choice.chosen].scope.str();
}

std::vector<std::string> candidates(const ScopeChoice& choice) {
  std::vector<std::string> scopes;
  for (const ScopeCandidate& candidate : choice.candidates) scopes.push_back(candidate.scope.str());
  return scopes;
}

TEST(ScopeChoice, IsTheNarrowestThatReachesTheWantedNumber) {
  const std::vector<PartMoments> calls = {normal_parts(8, 4)};
  const Hosts hosts(8, 0);

  EXPECT_EQ(chosen(choose(calls, 3, hosts)), "local");
  EXPECT_EQ(chosen(choose(calls, 6, hosts)), "group:2");
  EXPECT_EQ(chosen(choose(calls, 12, hosts)), "group:4");
  EXPECT_EQ(chosen(choose(calls, 24, hosts)), "world");
  EXPECT_EQ(chosen(choose(calls, 1000, hosts)), "world");
}

TEST(ScopeChoice, WidensIfTheIntervalReachesBelowTheWantedNumber) {
  const std::vector<PartMoments> calls = {normal_parts(4, 4, 4)};
  const IndependentValues local = independent_values(calls[0], kEps).value();
  const double wanted = (local.lower + local.value) / 2;

  EXPECT_EQ(chosen(choose(calls, wanted, Hosts(4, 0))), "group:2");
  EXPECT_EQ(chosen(choose(calls, local.lower, Hosts(4, 0))), "local");
}

TEST(ScopeChoice, HasTheDivisorsOfTheRanksForGroups) {
  EXPECT_EQ(candidates(choose({normal_parts(6, 4)}, 4, Hosts(6, 0))),
            (std::vector<std::string>{"local", "group:2", "group:3", "world"}));
  EXPECT_EQ(candidates(choose({normal_parts(1, 4)}, 4, Hosts(1, 0))),
            (std::vector<std::string>{"local"}));
}

TEST(ScopeChoice, NamesAGroupNodeIfEachHostHoldsOne) {
  const std::vector<PartMoments> calls = {normal_parts(4, 4)};
  const auto third = [&](const Hosts& hosts) { return candidates(choose(calls, 4, hosts))[1]; };

  EXPECT_EQ(third({7, 7, -2, -2}), "node");
  EXPECT_EQ(third({7, 7, 7, 7}), "group:2");
  EXPECT_EQ(third({7, -2, 7, -2}), "group:2");
  EXPECT_EQ(third({7, 7, 7, -2}), "group:2");
  EXPECT_EQ(third({7, 7, -2, 5}), "group:2");
}

TEST(ScopeChoice, ExtrapolatesForASingleNormBatch) {
  const ScopeChoice choice = choose({normal_parts(4, 4, 1)}, 1000, Hosts(4, 0));

  const ScopeCandidate& world = choice.candidates.back();
  EXPECT_TRUE(world.extrapolated);
  EXPECT_FALSE(choice.candidates[1].extrapolated);
  EXPECT_DOUBLE_EQ(world.values.value().value, 4 * choice.candidates[0].values.value().value);
}

TEST(ScopeChoice, IsMadeForTheNoisiestCall) {
  const std::vector<PartMoments> calls = {normal_parts(4, 16), normal_parts(4, 2)};

  const ScopeChoice choice = choose(calls, 6, Hosts(4, 0));

  EXPECT_EQ(chosen(choice), "world");
  EXPECT_EQ(choice.candidates[0].values.value().value,
            independent_values(calls[1], kEps).value().value);
}

TEST(ScopeChoice, DoesNotPoolCallsWithDifferentData) {
  // Both calls are equally good. Pooled, their different means would look like noise.
  PartMoments far = normal_parts(4, 16);
  for (std::size_t i = 0; i < far.rows.size(); ++i) {
    const auto channels = static_cast<std::size_t>(far.channels);
    const std::size_t in_row = i % (1 + 2 * channels);
    if (in_row >= 1 && in_row <= channels) far.rows[i] += 100.0;
  }

  EXPECT_EQ(chosen(choose({normal_parts(4, 16), far}, 12, Hosts(4, 0))), "local");
}

TEST(ScopeChoice, IsWorldIfNothingCanBeCompared) {
  const ScopeChoice choice =
      choose({moments_of(1, 2, 1,
                         [](auto, auto k, auto) {
                           return k == 0 ? std::vector<double>{1.0, 2.0} : std::vector<double>{};
                         })},
             4, Hosts(2, 0));

  EXPECT_EQ(chosen(choice), "world");
  EXPECT_FALSE(choice.candidates.back().values.has_value());
}

TEST(ScopeChoice, RefusesMomentsThatAreNotFinite) {
  PartMoments moments = normal_parts(2, 4);
  moments.rows[1] = std::numeric_limits<double>::quiet_NaN();

  EXPECT_EQ(text_of<ArgumentError>([&] { (void)choose({moments}, 4, Hosts(2, 0)); }),
            "batches: expected finite inputs of every layer, got NaN or infinity in bn1");
}

}  // namespace
}  // namespace normscope::testing
