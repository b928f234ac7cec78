// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/nn/progressive_scope.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "normscope/core/error.h"
#include "normscope/torch/nn/batch_norm.h"

namespace normscope::testing {
namespace {

// The scope of the layer before each of the first `steps` steps.
std::vector<std::string> scopes_of_steps(nn::ProgressiveScope schedule,
                                         const nn::BatchNorm1d& layer, int steps) {
  std::vector<std::string> scopes;
  for (int step = 0; step < steps; ++step) {
    scopes.push_back(layer->options.scope().str());
    schedule.step();
  }
  return scopes;
}

TEST(ProgressiveScope, ChangesTheScopeAtItsMilestones) {
  nn::BatchNorm1d layer(4);

  EXPECT_EQ(scopes_of_steps({*layer, {Scope::local(), Scope::group(2), Scope::world()}, {0, 1, 3}},
                            layer, 5),
            (std::vector<std::string>{"local", "group:2", "group:2", "world", "world"}));
}

TEST(ProgressiveScope, DoublesUpToTheWorld) {
  nn::BatchNorm1d layer(4);

  EXPECT_EQ(scopes_of_steps(nn::ProgressiveScope::doubling(*layer, 4, 6), layer, 4),
            (std::vector<std::string>{"local", "group:2", "group:4", "world"}));
  EXPECT_EQ(scopes_of_steps(nn::ProgressiveScope::doubling(*layer, 2, 1), layer, 2),
            (std::vector<std::string>{"local", "local"}));
}

TEST(ProgressiveScope, GoesOnFromACheckpoint) {
  nn::BatchNorm1d layer(4);
  nn::ProgressiveScope schedule(*layer, {Scope::local(), Scope::world()}, {0, 10});

  schedule.set_last_step(10);

  EXPECT_EQ(layer->options.scope(), Scope::world());
  EXPECT_EQ(schedule.last_step(), 10);
  EXPECT_THROW(schedule.set_last_step(-1), ArgumentError);
}

TEST(ProgressiveScope, RefusesMilestonesThatDoNotFit) {
  nn::BatchNorm1d layer(4);
  torch::nn::Sequential none(torch::nn::Linear(2, 2));

  EXPECT_THROW(nn::ProgressiveScope(*layer, {}, {}), ArgumentError);
  EXPECT_THROW(nn::ProgressiveScope(*layer, {Scope::local()}, {0, 1}), ArgumentError);
  EXPECT_THROW(nn::ProgressiveScope(*layer, {Scope::local()}, {1}), ArgumentError);
  EXPECT_THROW(nn::ProgressiveScope(*layer, {Scope::local(), Scope::world()}, {0, 0}),
               ArgumentError);
  EXPECT_THROW((void)nn::ProgressiveScope::doubling(*layer, 2, 4), ArgumentError);
  EXPECT_THROW(nn::ProgressiveScope(*none, {Scope::local()}, {0}), ArgumentError);
}

}  // namespace
}  // namespace normscope::testing
