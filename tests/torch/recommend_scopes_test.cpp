// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/nn/recommend_scopes.h"

#include <cmath>
#include <functional>
#include <latch>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>
#include <torch/types.h>

#include "normscope/core/activation.h"
#include "normscope/core/error.h"
#include "normscope/core/scope_choice.h"
#include "normscope/torch/nn/batch_norm.h"
#include "normscope/torch/nn/convert.h"
#include "tests/support/text_of.h"
#include "tests/torch/groups.h"

namespace normscope::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kBatches = 8;

// The first layer normalizes 64 positions of noise per image, the last one a single value.
torch::nn::Sequential measured_network() {
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).padding(1)),
                            nn::BatchNorm2d(8), torch::nn::Dropout(0.5),
                            torch::nn::AdaptiveAvgPool2d(1), torch::nn::Flatten(),
                            torch::nn::Linear(8, 16), nn::BatchNorm1d(16));
  // As if it had trained.
  for (const auto& buffer : net->named_buffers()) {
    if (buffer.key().ends_with("num_batches_tracked")) buffer.value().fill_(kTrainedUpdates);
  }
  return net;
}

// The same without the dropout's noise.
torch::nn::Sequential network_without_dropout() {
  torch::nn::Sequential net = measured_network();
  net[2]->eval();
  return net;
}

std::vector<at::Tensor> noise(std::int64_t samples) {
  auto generator = at::detail::createCPUGenerator(1);
  std::vector<at::Tensor> batches;
  for (std::int64_t i = 0; i < kBatches; ++i) {
    batches.push_back(torch::randn({samples, 3, 8, 8}, generator));
  }
  return batches;
}

std::vector<at::Tensor> no_outputs(std::int64_t) { return {}; }

nn::ScopePlan plan_of(torch::nn::Sequential& net, const std::vector<at::Tensor>& batches,
                      const RankGroup& group, const nn::RecommendOptions& options) {
  return nn::recommend_scopes(
      *net, static_cast<std::int64_t>(batches.size()),
      [&](std::int64_t batch) {
        return std::vector{net->forward(batches[static_cast<std::size_t>(batch)])};
      },
      group, options);
}

// The scopes of the layers, and the noise of each candidate.
std::vector<std::string> scopes_of(const nn::ScopePlan& plan) {
  std::vector<std::string> scopes;
  for (const nn::LayerPlan& layer : plan.layers) {
    scopes.push_back(layer.layer + " " + plan.chosen(layer).scope.str());
  }
  return scopes;
}

std::vector<double> noise_of(const nn::ScopePlan& plan) {
  std::vector<double> noise;
  for (const nn::LayerPlan& layer : plan.layers) {
    noise.insert(noise.end(), layer.noise.begin(), layer.noise.end());
  }
  return noise;
}

TEST(RecommendScopes, GivesLayersWithFewValuesWideScopes) {
  torch::nn::Sequential net = network_without_dropout();

  const nn::ScopePlan plan =
      plan_of(net, noise(16), alone(), nn::RecommendOptions().noise(1).ranks(8));
  plan.apply(*net);

  EXPECT_EQ(scopes_of(plan), (std::vector<std::string>{"1 local", "6 world"}));
  EXPECT_EQ(plan.candidates.size(), 2U);
  EXPECT_EQ(plan.layers[0].updates, kTrainedUpdates);
  EXPECT_GT(plan.layers[0].noise[0], 0.0);
  EXPECT_DOUBLE_EQ(plan.noise.mean, plan.layers[0].noise[0]);
  EXPECT_EQ(plan.ranks, 8);
  EXPECT_EQ(plan.batches, kBatches);
  EXPECT_EQ(plan.exchanges_per_step(), 2);
  EXPECT_EQ(plan.bytes_per_step(), 2 * (16 * 80 + 32));
  EXPECT_EQ(net[1]->as<nn::BatchNorm2d>()->options.scope(), Scope::local());
  EXPECT_EQ(net[6]->as<nn::BatchNorm1d>()->options.scope(), Scope::world());
}

TEST(RecommendScopes, MeasuresAnActivationAsPartOfWhatFollows) {
  torch::manual_seed(0);
  const auto relu = nn::BatchNormOptions(3).activation({.kind = Activation::kRelu});
  torch::nn::Sequential fused{nn::BatchNorm2d(relu)};
  torch::nn::Sequential apart(nn::BatchNorm2d(3), torch::nn::ReLU());
  const auto options = nn::RecommendOptions().ranks(4);

  EXPECT_EQ(noise_of(plan_of(fused, noise(8), alone(), options)),
            noise_of(plan_of(apart, noise(8), alone(), options)));
}

TEST(RecommendScopes, DoesNotDependOnTheModeAroundIt) {
  torch::nn::Sequential net = network_without_dropout();
  const std::vector<at::Tensor> batches = noise(8);
  const auto options = nn::RecommendOptions().ranks(2);
  const std::vector<double> expected = noise_of(plan_of(net, batches, alone(), options));

  const c10::InferenceMode inference_mode;

  EXPECT_EQ(noise_of(plan_of(net, batches, alone(), options)), expected);
}

TEST(RecommendScopes, CountsBatchesThatReachNoLayer) {
  torch::nn::Sequential net = network_without_dropout();
  const at::Tensor x = noise(16)[0];
  const auto forward = [&](std::int64_t batch) {
    return std::vector{batch == 0 ? net->forward(x) : net[0]->as<torch::nn::Conv2d>()->forward(x)};
  };
  const auto options = nn::RecommendOptions().ranks(2);

  std::vector<double> expected = noise_of(nn::recommend_scopes(*net, 1, forward, alone(), options));
  for (double& noise : expected) noise /= 2;

  EXPECT_EQ(noise_of(nn::recommend_scopes(*net, 2, forward, alone(), options)), expected);
}

TEST(RecommendScopes, MeasuresBothPartsOfComplexOutputs) {
  torch::nn::Sequential net = network_without_dropout();
  const at::Tensor x = noise(16)[0];
  const auto noise_of_outputs = [&](bool are_complex) {
    const auto forward = [&](std::int64_t) {
      const at::Tensor y = net->forward(x), z = y.sin();
      return are_complex ? std::vector{torch::complex(y, z)} : std::vector{y, z};
    };
    return noise_of(
        nn::recommend_scopes(*net, 1, forward, alone(), nn::RecommendOptions().ranks(2)));
  };

  EXPECT_EQ(noise_of_outputs(true), noise_of_outputs(false));
}

class RecommendScopesOfRanks : public ::testing::TestWithParam<int> {};

TEST_P(RecommendScopesOfRanks, IsThatOfSlicesOnEveryRank) {
  const int ranks = GetParam();
  const std::vector<at::Tensor> batches = noise(12);
  torch::nn::Sequential net = network_without_dropout();
  const auto options = nn::RecommendOptions().noise(1);
  const nn::ScopePlan expected =
      plan_of(net, batches, alone(), nn::RecommendOptions(options).ranks(ranks));

  run_ranks(ranks, [&](const RankGroup& group) {
    auto replica = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
    torch::nn::Sequential own(replica);
    nn::convert(*own, Scope::local(), group);
    std::vector<at::Tensor> shares;
    for (const at::Tensor& batch : batches) shares.push_back(batch.chunk(ranks)[group.rank()]);

    const nn::ScopePlan plan = plan_of(own, shares, group, options);

    EXPECT_EQ(scopes_of(plan), scopes_of(expected));
    EXPECT_EQ(plan.ranks, ranks);
    EXPECT_TRUE(plan.layers[0].exchange_seconds.has_value());
    const std::vector<double> of_ranks = noise_of(plan), of_slices = noise_of(expected);
    ASSERT_EQ(of_ranks.size(), of_slices.size());
    for (std::size_t i = 0; i < of_ranks.size(); ++i) {
      // Inputs of layers are float32, and their last bits depend on how a batch is cut.
      EXPECT_NEAR(of_ranks[i], of_slices[i], 1e-4 * of_slices[i]);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, RecommendScopesOfRanks, ::testing::Values(2, 3));

class LeavesTheModule : public ::testing::TestWithParam<bool> {};

TEST_P(LeavesTheModule, AsItWas) {
  const bool throws = GetParam();
  torch::nn::Sequential net = measured_network();
  net->push_back(torch::nn::BatchNorm1d(16));
  net->forward(noise(4)[0]);
  nn::set_scope(*net, Scope::slices(2));
  net[1]->eval();
  int observed = 0;
  net[1]->as<nn::BatchNorm2d>()->observer = [&](const at::Tensor&, const at::Tensor& z) {
    ++observed;
    return z;
  };
  const at::Tensor resized = net->register_buffer("resized", torch::empty(0));
  std::vector<at::Tensor> tensors = net->parameters(), before;
  for (const at::Tensor& buffer : net->buffers()) tensors.push_back(buffer);
  for (const at::Tensor& tensor : tensors) before.push_back(tensor.clone());
  const at::Tensor generator = at::globalContext().defaultGenerator(at::kCPU).get_state();
  const std::vector<at::Tensor> batches = noise(8);
  const auto forward = [&](std::int64_t batch) {
    resized.resize_(1 + batch);
    const at::Tensor y = net->forward(batches[static_cast<std::size_t>(batch)]);
    if (throws && batch == 2) throw std::runtime_error("enough");
    return std::vector{y};
  };

  if (throws) {
    EXPECT_THROW((void)nn::recommend_scopes(*net, kBatches, forward, alone()), std::runtime_error);
  } else {
    (void)nn::recommend_scopes(*net, kBatches, forward, alone(), nn::RecommendOptions().ranks(2));
  }

  for (std::size_t i = 0; i < tensors.size(); ++i) EXPECT_TRUE(torch::equal(tensors[i], before[i]));
  EXPECT_TRUE(torch::equal(at::globalContext().defaultGenerator(at::kCPU).get_state(), generator));
  EXPECT_TRUE(net->is_training());
  EXPECT_FALSE(net[1]->is_training());
  EXPECT_TRUE(net[7]->is_training());
  EXPECT_EQ(net[1]->as<nn::BatchNorm2d>()->options.scope(), Scope::slices(2));
  ASSERT_TRUE(net[1]->as<nn::BatchNorm2d>()->observer);
  net[1]->as<nn::BatchNorm2d>()->observer({}, {});
  EXPECT_EQ(observed, 1);
  for (const at::Tensor& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
}

TEST(RecommendScopes, ThrowsTorchsErrorForBuffersMadeInInferenceMode) {
  torch::nn::Sequential net;
  {
    const c10::InferenceMode inference_mode;
    net->push_back(nn::BatchNorm2d(nn::BatchNormOptions(3).affine(false)));
  }

  EXPECT_THAT(text_of<c10::Error>(
                  [&] { (void)plan_of(net, noise(8), alone(), nn::RecommendOptions().ranks(2)); }),
              HasSubstr("Inplace update to inference tensor"));
  EXPECT_TRUE(torch::equal(net[0]->as<nn::BatchNorm2d>()->running_mean, torch::zeros(3)));
}

TEST(RecommendScopes, LeavesLayersInEvaluationAsTheyAre) {
  torch::nn::Sequential net = measured_network();
  net[1]->eval();
  net[1]->as<nn::BatchNorm2d>()->running_mean.fill_(5.0);
  at::Tensor seen;
  const at::Tensor batch = noise(16)[0];

  const nn::ScopePlan plan = nn::recommend_scopes(
      *net, 1,
      [&](std::int64_t) {
        seen = net[1]->as<nn::BatchNorm2d>()->forward(torch::full({16, 8, 2, 2}, 6.0));
        return std::vector{net->forward(batch)};
      },
      alone(), nn::RecommendOptions().ranks(2));

  EXPECT_NEAR(seen.min().item<float>(), 1.0F, 1e-4);  // by its running statistics
  ASSERT_EQ(plan.layers.size(), 1U);
  EXPECT_EQ(plan.layers[0].layer, "6");
  net->eval();
  EXPECT_THAT(text_of<std::exception>([&] { (void)plan_of(net, noise(16), alone(), {}); }),
              HasSubstr("layers of normscope in training"));
}

INSTANTIATE_TEST_SUITE_P(Whether, LeavesTheModule, ::testing::Bool(), [](const auto& parameters) {
  return parameters.param ? "ItThrows" : "ItEnds";
});

TEST(RecommendScopes, RefusesArgumentsThatDoNotFit) {
  torch::nn::Sequential net = measured_network(), none(torch::nn::Linear(2, 2));
  const auto error = [&](torch::nn::Sequential& model, std::int64_t samples,
                         const nn::RecommendOptions& options) {
    return text_of<std::exception>([&] { (void)plan_of(model, noise(samples), alone(), options); });
  };

  EXPECT_EQ(error(net, 4, nn::RecommendOptions().noise(-0.1)),
            "noise: expected at least 0, got -0.1");
  EXPECT_EQ(error(net, 4, nn::RecommendOptions().noise(std::nan(""))),
            "noise: expected at least 0, got nan");
  EXPECT_EQ(
      error(net, 4, nn::RecommendOptions().ranks(0)),
      "ranks: expected at least 1, and exactly 1 if the group has several ranks (it has 1), got 0");
  EXPECT_EQ(error(net, 2, nn::RecommendOptions().ranks(3)),
            "batches: expected at least 3 samples, one for each rank, got 2 in 1");
  EXPECT_THAT(error(none, 4, {}), HasSubstr("expected layers of normscope"));
  EXPECT_THAT(error(net, 1, {}), HasSubstr("more than 1 value per channel"));
  EXPECT_EQ(
      text_of<std::exception>([&] { (void)nn::recommend_scopes(*net, 0, no_outputs, alone()); }),
      "batches: expected at least one, got 0");
  EXPECT_EQ(
      text_of<std::exception>([&] { (void)nn::recommend_scopes(*net, 1, no_outputs, alone()); }),
      "forward: expected outputs with a gradient, whose noise can be measured, got none");
  EXPECT_EQ(text_of<std::exception>([&] { (void)nn::recommend_scopes(*net, 1, nullptr, alone()); }),
            "forward: expected a function, got none");
  std::vector<at::Tensor> infinite = noise(8);
  infinite[0] /= 0;
  EXPECT_EQ(text_of<std::exception>(
                [&] { (void)plan_of(net, infinite, alone(), nn::RecommendOptions().ranks(2)); }),
            "batches: expected finite inputs and gradients of every layer, got NaN or infinity in "
            "1");
}

TEST(RecommendScopes, ThrowsIfRanksDiffer) {
  run_ranks(3, [](const RankGroup& group) {
    torch::nn::Sequential net = measured_network();
    nn::convert(*net, Scope::world(), group);
    const std::vector<at::Tensor> batches = noise(4);
    const auto error = [&](std::int64_t count, double wanted) {
      return text_of<std::exception>([&] {
        (void)nn::recommend_scopes(*net, count, no_outputs, group,
                                   nn::RecommendOptions().noise(wanted));
      });
    };

    EXPECT_EQ(error(1 + group.rank(), 4),
              "batches: expected the same number on every rank, since layers synchronize, got "
              "[1, 2, 3]");
    EXPECT_EQ(error(1, 4 + group.rank()),
              "noise: expected the same number on every rank, got [4, 5, 6]");
    // The group is still usable.
    EXPECT_EQ(plan_of(net, batches, group, {}).layers.size(), 2U);
  });
}

TEST(RecommendScopes, EndsTheWaitForARankThatThrows) {
  using Net = torch::nn::Sequential;
  using Fault = std::function<at::Tensor(Net&, const at::Tensor&)>;
  const Fault throws = [](Net&, const at::Tensor&) -> at::Tensor {
    throw std::runtime_error("no such image");
  };
  const Fault throws_a_number = [](Net&, const at::Tensor&) -> at::Tensor {
    throw 42;  // NOLINT(bugprone-std-exception-baseclass): as programs may do
  };
  const Fault makes_sparse = [](Net& net, const at::Tensor& x) {
    return net->forward(x).to_sparse();
  };
  const std::vector<std::pair<Fault, std::string>> faults = {
      {throws, "no such image"},
      {throws_a_number, "an unknown exception"},
      {makes_sparse, "rank 0 of 2 failed: "},
  };
  for (const auto& [fault, reason] : faults) {
    std::latch is_done(2);
    run_ranks(2, [&](const RankGroup& group) {
      Net net = measured_network();
      nn::convert(*net, Scope::world(), group);
      const at::Tensor x = noise(4)[0];
      const auto forward = [&](std::int64_t batch) {
        const bool fails = group.rank() == 0 && batch == 1;
        return std::vector{fails ? fault(net, x) : net->forward(x)};
      };
      const auto recommend = [&] { (void)nn::recommend_scopes(*net, 2, forward, group); };

      if (group.rank() == 0) {
        EXPECT_ANY_THROW(recommend());
      } else {
        EXPECT_THAT(text_of<std::exception>(recommend), HasSubstr(reason));
      }
      is_done.arrive_and_wait();  // a group that ends notifies the peers, too
    });
  }
}

TEST(ScopePlan, IsRefusedByAModuleWithoutItsLayers) {
  torch::nn::Sequential net = measured_network(), none(torch::nn::Linear(2, 2));
  const nn::ScopePlan plan = plan_of(net, noise(8), alone(), nn::RecommendOptions().ranks(2));

  EXPECT_EQ(text_of<std::exception>([&] { plan.apply(*none); }),
            "module: expected layers of normscope called 1, 6, got none");
}

TEST(ScopePlan, IsRefusedByLayersOfOtherChannels) {
  torch::nn::Sequential net{nn::BatchNorm2d(3)}, other{nn::BatchNorm2d(4)};
  const nn::ScopePlan plan = plan_of(net, noise(8), alone(), nn::RecommendOptions().ranks(2));

  EXPECT_EQ(text_of<std::exception>([&] { plan.apply(*other); }),
            "module: expected 3 channels in 0, for which the plan was made, got 4");
}

}  // namespace
}  // namespace normscope::testing
