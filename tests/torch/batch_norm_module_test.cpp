// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <latch>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include "normscope/core/error.h"
#include "normscope/core/header.h"
#include "normscope/torch/nn/batch_norm.h"
#include "tests/support/text_of.h"
#include "tests/torch/groups.h"

namespace normscope::testing {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Both sides compute in float64 (eps 2e-16) on data of condition one; sums have at most 200 terms.
constexpr double kRounding = 1e-12;

at::Tensor random(at::IntArrayRef shape, std::uint64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return torch::randn(shape, generator, torch::kDouble) * 3 + 7;
}

// The results of a training step.
struct Step {
  at::Tensor y, dx, dweight, dbias, running_mean, running_var, tracked;
};

template <class Layer>
Step step(Layer& layer, const at::Tensor& batch) {
  layer->to(torch::kDouble);
  const at::Tensor x = batch.detach().clone().requires_grad_();
  const at::Tensor y = layer->forward(x);
  y.backward(y.detach().sin());
  return {y.detach(),          x.grad(),           layer->weight.grad(),      layer->bias.grad(),
          layer->running_mean, layer->running_var, layer->num_batches_tracked};
}

void expect_near(const at::Tensor& got, const at::Tensor& expected, const char* what) {
  EXPECT_TRUE(torch::allclose(got, expected, kRounding, kRounding)) << what;
}

struct Sharing {
  const char* name;
  int ranks;
  Scope scope;
  std::vector<int> leaders;  // for each rank, the first of those that it shares with
};

class ModuleOnRanks : public ::testing::TestWithParam<Sharing> {};

TEST_P(ModuleOnRanks, TrainsAsTorchOnTheJoinedSamplesOfThoseThatShare) {
  const auto& [name, ranks, scope, leaders] = GetParam();
  std::vector<at::Tensor> batches;
  for (int rank = 0; rank < ranks; ++rank) {
    batches.push_back(random({1 + rank, 3, 4, 5}, static_cast<std::uint64_t>(rank)));
  }

  run_ranks(ranks, [&](const RankGroup& group) {
    nn::BatchNorm2d layer(nn::BatchNormOptions(3).scope(scope).group(group.name()));
    const auto self = static_cast<std::size_t>(group.rank());
    const Step got = step(layer, batches[self]);

    std::vector<at::Tensor> shared;
    std::int64_t begin = 0;
    for (std::size_t rank = 0; rank < batches.size(); ++rank) {
      if (leaders[rank] != leaders[self]) continue;
      if (rank < self) begin += batches[rank].size(0);
      shared.push_back(batches[rank]);
    }
    torch::nn::BatchNorm2d theirs(3);
    const Step expected = step(theirs, torch::cat(shared));
    const std::int64_t end = begin + batches[self].size(0);
    expect_near(got.y, expected.y.slice(0, begin, end), "y");
    expect_near(got.dx, expected.dx.slice(0, begin, end), "dx");
    expect_near(got.running_mean, expected.running_mean, "running_mean");
    expect_near(got.running_var, expected.running_var, "running_var");
    EXPECT_EQ(got.tracked.item<std::int64_t>(), 1);
    std::vector<double> sums(3 + kHeaderSize);
    std::copy_n(got.dbias.const_data_ptr<double>(), 3, sums.data());
    group.all_reduce(
        {.layer = "dbias", .scope = "world", .direction = Direction::kParameters, .channels = 3},
        sums);
    if (scope == Scope::world()) {
      for (std::size_t c = 0; c < 3; ++c) {
        EXPECT_NEAR(sums[c], expected.dbias[static_cast<std::int64_t>(c)].item<double>(),
                    kRounding);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(, ModuleOnRanks,
                         ::testing::Values(Sharing{"World2", 2, Scope::world(), {0, 0}},
                                           Sharing{"World3", 3, Scope::world(), {0, 0, 0}},
                                           Sharing{"World4", 4, Scope::world(), {0, 0, 0, 0}},
                                           Sharing{"Group2", 4, Scope::group(2), {0, 0, 2, 2}},
                                           Sharing{"Ranks", 3, Scope::ranks({{0, 2}}), {0, 1, 0}},
                                           Sharing{"Node", 2, Scope::node(), {0, 0}},
                                           Sharing{"Local", 2, Scope::local(), {0, 1}},
                                           Sharing{
                                               "NormBatch", 4, Scope::norm_batch(8), {0, 0, 2, 2}}),
                         [](const auto& sharing) { return std::string(sharing.param.name); });

TEST(Module, SlicesFollowTheirRule) {
  const RankGroup group = alone();
  const at::Tensor x = random({5, 3, 2, 2}, 0);
  nn::BatchNorm2d layer(nn::BatchNormOptions(3)
                            .scope(Scope::slices(2))
                            .slice_stats(SliceStats::kFirst)
                            .group(group.name()));
  const Step got = step(layer, x);

  torch::nn::BatchNorm2d first(3), second(3);
  const Step of_first = step(first, x.slice(0, 0, 3));
  const Step of_second = step(second, x.slice(0, 3, 5));
  expect_near(got.y, torch::cat({of_first.y, of_second.y}), "y");
  expect_near(got.running_mean, of_first.running_mean, "running_mean");
  expect_near(got.running_var, of_first.running_var, "running_var");
}

TEST(Module, EvaluatesAsTorchToTheBit) {
  nn::BatchNorm1d ours(3);
  torch::nn::BatchNorm1d theirs(3);
  const at::Tensor x = torch::randn({4, 3});
  theirs->forward(x);
  torch::serialize::OutputArchive archive;
  theirs->save(archive);
  std::stringstream file;
  archive.save_to(file);
  torch::load(ours, file);

  ours->eval();
  theirs->eval();

  EXPECT_TRUE(torch::equal(ours->forward(x), theirs->forward(x)));
}

TEST(Module, StopsAndResumesToTrackRunningStatistics) {
  nn::BatchNorm2d layer(nn::BatchNormOptions(3).scope(Scope::local()));
  torch::nn::BatchNorm2d theirs(3);
  const at::Tensor x = random({4, 3, 5, 5}, 1).to(torch::kFloat);

  layer->options.track_running_stats(false);
  layer->forward(x);
  EXPECT_TRUE(torch::equal(layer->running_mean, torch::zeros({3})));
  EXPECT_EQ(layer->num_batches_tracked.item<std::int64_t>(), 0);

  // As in torch, evaluation then uses the statistics of the batch.
  layer->eval();
  theirs->eval();
  theirs->options.track_running_stats(false);
  EXPECT_TRUE(torch::equal(layer->forward(x), theirs->forward(x)));
  EXPECT_TRUE(torch::equal(layer->running_mean, torch::zeros({3})));

  layer->train();
  layer->options.track_running_stats(true);
  layer->forward(x);
  EXPECT_FALSE(torch::equal(layer->running_mean, torch::zeros({3})));
  EXPECT_EQ(layer->num_batches_tracked.item<std::int64_t>(), 1);
}

TEST(Module, SavesClonesAndMovesBetweenTypes) {
  nn::BatchNorm3d layer(nn::BatchNormOptions(2).momentum(std::nullopt));
  layer->forward(torch::randn({4, 2, 2, 2, 2}));
  std::stringstream file;
  torch::save(layer, file);

  nn::BatchNorm3d loaded(nn::BatchNormOptions(2).momentum(std::nullopt));
  torch::load(loaded, file);
  const auto clone = std::dynamic_pointer_cast<nn::BatchNorm3dImpl>(layer->clone());

  for (const auto& [name, buffer] : layer->named_buffers().pairs()) {
    EXPECT_TRUE(torch::equal(buffer, loaded->named_buffers()[name])) << name;
    EXPECT_TRUE(torch::equal(buffer, clone->named_buffers()[name])) << name;
    EXPECT_FALSE(buffer.is_alias_of(clone->named_buffers()[name])) << name;
  }
  layer->to(torch::kDouble);
  EXPECT_EQ(layer->forward(torch::randn({4, 2, 2, 2, 2}, torch::kDouble)).dtype(), torch::kDouble);
  EXPECT_EQ(layer->num_batches_tracked.item<std::int64_t>(), 2);
  EXPECT_EQ(clone->num_batches_tracked.item<std::int64_t>(), 1);

  std::stringstream file_of_doubles;
  torch::save(layer, file_of_doubles);
  loaded->to(torch::kDouble);
  torch::load(loaded, file_of_doubles);
  EXPECT_EQ(loaded->num_batches_tracked.item<std::int64_t>(), 2);
}

TEST(Module, PrintsItsScopeAndItsActivation) {
  std::stringstream text;
  text << nn::BatchNorm2d(nn::BatchNormOptions(8).scope(Scope::group(4)).affine(false));
  text << nn::BatchNorm2d(nn::BatchNormOptions(8).activation({Activation::kSilu}));

  EXPECT_THAT(
      text.str(),
      AllOf(StartsWith("normscope::nn::BatchNorm2d(8, eps=1e-05, momentum=0.1, affine=false, "
                       "track_running_stats=true, scope=group:4)"),
            EndsWith("scope=world, activation=silu)")));
}

TEST(Module, WithAnActivationEqualsTorchsActivationAfterIt) {
  const at::Tensor x = random({4, 3, 5, 5}, 0);
  const at::Tensor residual = random({4, 3, 5, 5}, 1) - 7;
  const auto sum = [](const at::Tensor& y, const at::Tensor& added) {
    return added.defined() ? y + added : y;
  };
  const struct {
    ActivationFunction activation;
    std::function<at::Tensor(const at::Tensor&)> theirs;
  } cases[] = {
      {{Activation::kRelu}, [](const at::Tensor& z) { return at::relu(z); }},
      {{Activation::kRelu6}, [](const at::Tensor& z) { return at::hardtanh(z, 0, 6); }},
      {{Activation::kLeakyRelu, 0.2}, [](const at::Tensor& z) { return at::leaky_relu(z, 0.2); }},
      {{Activation::kLeakyRelu, -1.5}, [](const at::Tensor& z) { return at::leaky_relu(z, -1.5); }},
      {{Activation::kSilu}, [](const at::Tensor& z) { return at::silu(z); }},
      {{Activation::kHardSwish}, [](const at::Tensor& z) { return at::hardswish(z); }},
  };
  for (const auto& [activation, theirs] : cases) {
    for (const at::Tensor& added : {at::Tensor(), residual, residual.narrow(0, 0, 1)}) {
      for (const bool trains : {true, false}) {
        nn::BatchNorm2d ours(nn::BatchNormOptions(3).activation(activation));
        nn::BatchNorm2d plain(3);
        ours->to(torch::kDouble);
        plain->to(torch::kDouble);
        ours->train(trains);
        plain->train(trains);
        const at::Tensor one = x.detach().clone().requires_grad_();
        const at::Tensor other = x.detach().clone().requires_grad_();

        const at::Tensor y = ours->forward(one, added);
        const at::Tensor expected = theirs(sum(plain->forward(other), added));
        y.backward(y.detach().sin());
        expected.backward(expected.detach().sin());

        expect_near(y, expected, "y");
        expect_near(one.grad(), other.grad(), "dx");
        expect_near(ours->weight.grad(), plain->weight.grad(), "dweight");
        expect_near(ours->running_var, plain->running_var, "running_var");
      }
    }
  }
}

// Calls whose last steps throw, after the normalization has its results.
struct LateError {
  const char* name;
  ActivationFunction activation;
  at::Tensor residual;
  std::function<at::Tensor(const at::Tensor&, const at::Tensor&)> observer = nullptr;
};

std::vector<LateError> late_errors() {
  const at::Tensor no_residual;
  const at::Tensor other_shape = torch::ones({7}, torch::kDouble);
  const at::Tensor complex = torch::ones({4, 3, 2, 2}, torch::kComplexDouble);
  const at::Tensor elsewhere = torch::empty({4, 3, 2, 2}, torch::kMeta);
  const auto throws = [](const at::Tensor&, const at::Tensor&) -> at::Tensor {
    TORCH_CHECK(false, "the observer is out of disk space");
  };
  return {{"another shape", {Activation::kNone}, other_shape},
          {"another shape before relu", {Activation::kRelu}, other_shape},
          {"another shape before silu", {Activation::kSilu}, other_shape},
          {"complex before relu", {Activation::kRelu}, complex},
          {"complex before hard swish", {Activation::kHardSwish}, complex},
          {"another device", {Activation::kNone}, elsewhere},
          {"another device before relu", {Activation::kRelu}, elsewhere},
          {"an observer that throws", {Activation::kRelu}, no_residual, throws},
          {"another shape after an observer",
           {Activation::kRelu},
           other_shape,
           [](const at::Tensor&, const at::Tensor& z) { return z; }}};
}

TEST(Module, ThatThrowsHasUpdatedNothing) {
  for (const LateError& error : late_errors()) {
    for (const Scope& scope : {Scope::world(), Scope::slices(2)}) {
      SCOPED_TRACE(std::string(error.name) + ", " + scope.str());
      nn::BatchNorm2d layer(nn::BatchNormOptions(3).scope(scope).activation(error.activation));
      layer->to(torch::kDouble);
      layer->observer = error.observer;
      std::vector<at::Tensor> before;
      for (const at::Tensor& buffer : layer->buffers()) before.push_back(buffer.clone());

      EXPECT_THROW(layer->forward(random({4, 3, 2, 2}, 0), error.residual), c10::Error);

      for (std::size_t i = 0; i < before.size(); ++i) {
        EXPECT_TRUE(torch::equal(layer->buffers()[i], before[i]))
            << layer->named_buffers().keys()[i];
      }
    }
  }
}

TEST(Module, ThatThrowsAfterItsExchangeNotifiesThePeers) {
  const std::pair<at::Tensor, const char*> residuals_and_errors[] = {
      {torch::ones({7}), "must match the size of tensor b"}, {at::Tensor(), "too large"}};
  for (const auto& [residual, error] : residuals_and_errors) {
    std::latch is_done(2);
    run_ranks(2, [&, residual = residual, error = error](const RankGroup& group) {
      nn::BatchNorm2d layer(
          nn::BatchNormOptions(3).group(group.name()).activation({Activation::kRelu}));
      const at::Tensor x = torch::randn({4, 3, 2, 2});
      if (group.rank() == 0 && residual.defined()) {
        EXPECT_THAT(text_of<c10::Error>([&] { layer->forward(x, residual); }), HasSubstr(error));
      } else if (group.rank() == 0) {
        layer->observer = [](const at::Tensor&, const at::Tensor& z) {
          TORCH_CHECK_VALUE(false, "too large");
          return z;
        };
        EXPECT_THAT(text_of<c10::ValueError>([&] { layer->forward(x); }), HasSubstr(error));
      } else {
        layer->forward(x);
        EXPECT_THAT(text_of<c10::Error>([&] { layer->forward(x); }), HasSubstr(error));
      }
      is_done.arrive_and_wait();  // a group that ends notifies the peers, too
    });
  }
}

TEST(Module, WithoutAnInputNotifiesThePeers) {
  for (const Scope& scope : {Scope::world(), Scope::norm_batch(8)}) {
    SCOPED_TRACE(scope.str());
    std::latch is_done(2);
    run_ranks(2, [&](const RankGroup& group) {
      nn::BatchNorm2d layer(nn::BatchNormOptions(3).group(group.name()).scope(scope));
      const at::Tensor x = group.rank() == 0 ? at::Tensor() : torch::randn({4, 3, 2, 2});
      layer->forward(torch::randn({4, 3, 2, 2}));

      EXPECT_THAT(text_of<c10::Error>([&] { layer->forward(x); }),
                  HasSubstr("x: expected a tensor, got none"));
      is_done.arrive_and_wait();  // a group that ends notifies the peers, too
    });
  }
}

TEST(Module, RefusesAnInputOfOtherDimensionsAndAGroupThatIsGone) {
  std::string name;
  {
    const RankGroup group = alone();
    name = group.name();
  }
  nn::BatchNorm2d layer(3), without_group(nn::BatchNormOptions(3).group(name));

  for (const bool trains : {false, true}) {
    layer->train(trains);
    EXPECT_THAT(text_of<c10::ValueError>([&] { layer->forward(torch::randn({4, 3})); }),
                HasSubstr("x: expected 4 dimensions, got 2"));
    EXPECT_THAT(
        text_of<c10::ValueError>([&] { layer->forward(torch::empty(0)); }),
        HasSubstr("x: expected at least 2 dimensions, got 1 (an empty batch has the shape"));
  }
  EXPECT_THAT(text_of<c10::TypeError>([&] { layer->forward(at::Tensor()); }),
              HasSubstr("x: expected a tensor, got none"));
  EXPECT_THAT(text_of<c10::Error>([&] { without_group->forward(torch::randn({4, 3, 2, 2})); }),
              HasSubstr("got the name \"" + name + "\""));
}

TEST(Module, ANullGroupIsRefused) {
  EXPECT_THROW(RankGroup(std::unique_ptr<Communicator>()), ArgumentError);
}

}  // namespace
}  // namespace normscope::testing
