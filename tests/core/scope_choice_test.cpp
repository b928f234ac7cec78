// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/scope_choice.h"

#include <cmath>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "normscope/core/error.h"
#include "tests/support/text_of.h"

namespace normscope::testing {
namespace {

using Hosts = std::vector<std::int64_t>;
using Chosen = std::vector<std::size_t>;

std::vector<std::string> candidates(const Hosts& hosts) {
  std::vector<std::string> scopes;
  for (const ScopeCandidate& each : candidate_scopes(hosts)) {
    scopes.push_back(each.scope.str() + " " + std::to_string(each.ranks));
  }
  return scopes;
}

TEST(CandidateScopes, AreLocalNodeAndWorld) {
  using Scopes = std::vector<std::string>;

  EXPECT_EQ(candidates(Hosts(1, 5)), (Scopes{"local 1"}));
  EXPECT_EQ(candidates(Hosts(6, 5)), (Scopes{"local 1", "world 6"}));
  EXPECT_EQ(candidates({5, 5, 7, 7}), (Scopes{"local 1", "node 2", "world 4"}));
}

TEST(CandidateScopes, HaveNoNodeIfHostsDifferOrHaveOneRank) {
  EXPECT_EQ(candidates({5, 7, 5, 7}).size(), 2U);
  EXPECT_EQ(candidates({5, 5, 5, 7}).size(), 2U);
  EXPECT_EQ(candidates({5, 6, 7, 8}).size(), 2U);
  EXPECT_EQ(candidates({5, 5, 7, 7, 5, 5}).size(), 2U);
}

// A layer with the candidates local, node and world. Its local noise is the same in each of
// `batches` batches, and that of node a tenth of it.
LayerNoise layer(double noise, std::int64_t bytes = 100, std::size_t batches = 4) {
  return {.layer = "bn",
          .exchange_bytes = bytes,
          .candidates = {{std::vector<double>(batches, noise), 2, 100},
                         {std::vector<double>(batches, noise / 10), 4, 200},
                         {std::vector<double>(batches, 0.0), 8, 400}}};
}

TEST(ScopeChoice, IsLocalWhereAllOfTheNoiseIsAllowed) {
  const std::vector<LayerNoise> layers = {layer(0.02), layer(0.03)};

  EXPECT_EQ(choose_scopes(layers, 0.05), (Chosen{0, 0}));
}

TEST(ScopeChoice, IsWorldWhereAnyNoiseIsTooMuch) {
  const std::vector<LayerNoise> layers = {layer(0.02), layer(0.03), layer(0.0)};

  EXPECT_EQ(choose_scopes(layers, 0.0), (Chosen{2, 2, 0}));
}

TEST(ScopeChoice, WidensTheLayersWithMostNoisePerByteFirst) {
  // The second has less noise than the first, but more per byte.
  const std::vector<LayerNoise> layers = {layer(0.04, 1000), layer(0.03, 100)};

  EXPECT_EQ(choose_scopes(layers, 0.045), (Chosen{0, 1}));
}

TEST(ScopeChoice, NarrowsLayersAgainThatNeedNotBeWide) {
  // By noise per byte the first comes first, but then the second has to be wide anyway.
  const std::vector<LayerNoise> layers = {layer(0.01, 10), layer(0.9, 1000)};

  EXPECT_EQ(choose_scopes(layers, 0.02), (Chosen{0, 2}));
}

TEST(ScopeChoice, KeepsToTheHostIfThatIsEnough) {
  const std::vector<LayerNoise> layers = {layer(0.3)};

  EXPECT_EQ(choose_scopes(layers, 0.03), (Chosen{1}));
  EXPECT_EQ(choose_scopes(layers, 0.02), (Chosen{2}));
}

TEST(ScopeChoice, LeavesOutNormBatchesThatAreTooSmall) {
  std::vector<LayerNoise> layers = {layer(0.0), layer(0.0), layer(0.0)};
  layers[0].candidates[0].samples = 1;
  layers[1].candidates[0].elements = 7;
  layers[2].candidates[0].elements = 7;
  layers[2].candidates[1].elements = 7;
  layers[2].candidates[2].elements = 7;  // world is the last resort

  EXPECT_EQ(choose_scopes(layers, 1.0), (Chosen{1, 1, 2}));
}

TEST(ScopeChoice, IsWorldForLayersThatHaveNotTrained) {
  std::vector<LayerNoise> layers = {layer(0.0), layer(0.0)};
  layers[1].is_trained = false;

  EXPECT_EQ(choose_scopes(layers, 1.0), (Chosen{0, 2}));
}

TEST(ScopeChoice, AllowsForTheErrorOfTheNoise) {
  LayerNoise varied = layer(0.0);
  varied.candidates[0].noise = {0.02, 0.04, 0.06, 0.08};  // 0.05 ± 0.0129
  varied.candidates[1].noise = {0.01, 0.01, 0.01, 0.01};
  const std::vector<LayerNoise> layers = {varied};
  const double upper = 0.05 + 1.645 * std::sqrt(0.002 / 3 / 4);

  EXPECT_NEAR(total_noise(layers, Chosen{0}).upper(), upper, 1e-12);
  EXPECT_EQ(choose_scopes(layers, upper + 1e-9), (Chosen{0}));
  EXPECT_EQ(choose_scopes(layers, upper - 1e-9), (Chosen{1}));
}

TEST(ScopeChoice, IsWorldForNoiseThatCouldNotBeMeasured) {
  std::vector<LayerNoise> layers = {layer(HUGE_VAL), layer(0.01)};

  EXPECT_EQ(choose_scopes(layers, 0.05), (Chosen{2, 0}));
  EXPECT_EQ(total_noise(layers, Chosen{0, 0}).upper(), HUGE_VAL);
}

TEST(ScopeChoice, ThrowsForNoiseThatIsNotANumber) {
  std::vector<LayerNoise> layers = {layer(0.01), layer(std::nan(""))};

  EXPECT_EQ(text_of<ArgumentError>([&] { (void)choose_scopes(layers, 0.05); }),
            "batches: expected finite inputs and gradients of every layer, got NaN or infinity in "
            "bn");
}

TEST(TotalNoise, OfOneBatchHasNoError) {
  const std::vector<LayerNoise> layers = {layer(0.25, 100, 1), layer(0.5, 100, 1)};

  EXPECT_EQ(total_noise(layers, Chosen{0, 0}).mean, 0.75);
  EXPECT_EQ(total_noise(layers, Chosen{0, 0}).upper(), 0.75);
}

}  // namespace
}  // namespace normscope::testing
