// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/nn/data_parallel.h"

#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include "normscope/core/error.h"
#include "normscope/torch/nn/convert.h"
#include "tests/support/text_of.h"
#include "tests/torch/groups.h"

namespace normscope::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

torch::nn::Sequential trained_network() {
  return torch::nn::Sequential(torch::nn::Linear(6, 5), torch::nn::BatchNorm1d(5),
                               torch::nn::Linear(5, 2));
}

TEST(DataParallel, AllRanksGetTheParametersAndBuffersOfTheFirst) {
  run_ranks(3, [](const RankGroup& group) {
    torch::nn::Linear layer(300, 300),
        small(2, 3);  // one message for the first weight, one for the rest
    torch::nn::BatchNorm1d norm(4);
    torch::nn::Sequential net(layer, small, norm);
    const torch::NoGradGuard no_grad;
    for (const at::Tensor& parameter : net->parameters()) {
      parameter.fill_(group.rank() + 0.25);
      parameter.view(-1)[0] = -group.rank();
    }
    norm->num_batches_tracked.fill_(7 + group.rank());

    nn::broadcast_parameters(*net, group);

    for (const at::Tensor& parameter : net->parameters()) {
      EXPECT_EQ(parameter.view(-1)[0].item<float>(), 0.0F);
      EXPECT_TRUE((parameter.view(-1).slice(0, 1) == 0.25).all().item<bool>());
    }
    EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 7);
  });
}

TEST(DataParallel, GradientsBecomeTheirMeanAndMissingOnesStayUndefined) {
  run_ranks(4, [](const RankGroup& group) {
    torch::nn::Linear everywhere(2, 3), somewhere(2, 2), nowhere(1, 1), frozen(1, 1);
    torch::nn::Sequential net(everywhere, somewhere, nowhere, frozen);
    frozen->weight.set_requires_grad(false);
    for (const at::Tensor& parameter : everywhere->parameters()) {
      parameter.mutable_grad() = torch::full_like(parameter, group.rank());
    }
    if (group.rank() == 2) somewhere->weight.mutable_grad() = torch::ones({2, 2}).to_sparse();

    nn::average_gradients(*net, group);

    EXPECT_TRUE((everywhere->weight.grad() == 1.5).all().item<bool>());
    EXPECT_TRUE((everywhere->bias.grad() == 1.5).all().item<bool>());
    EXPECT_TRUE((somewhere->weight.grad() == 0.25).all().item<bool>());
    EXPECT_FALSE(somewhere->bias.grad().defined());
    EXPECT_FALSE(nowhere->weight.grad().defined());
    EXPECT_FALSE(frozen->weight.grad().defined());
  });
}

TEST(DataParallel, ComplexNumbersKeepBothParts) {
  run_ranks(2, [](const RankGroup& group) {
    torch::nn::Module module;
    const c10::complex<double> own(1.0 + group.rank(), 3.0 - group.rank());
    at::Tensor weight = module.register_parameter("weight", torch::full({2, 3}, own));
    weight.mutable_grad() = torch::full({2, 3}, own);

    nn::average_gradients(module, group);
    nn::broadcast_parameters(module, group);

    const auto expected = [](double real, double imaginary) {
      return torch::full({2, 3}, c10::complex<double>(real, imaginary));
    };
    EXPECT_TRUE(torch::equal(weight.grad(), expected(1.5, 2.5)));
    EXPECT_TRUE(torch::equal(weight.detach(), expected(1.0, 3.0)));
  });
}

TEST(DataParallel, RanksWithDifferentModulesAllGetAnErrorThatSaysSo) {
  run_ranks(2, [](const RankGroup& group) {
    torch::nn::Linear layer(2, 2 + group.rank());

    EXPECT_THAT(text_of<MismatchError>([&] { nn::broadcast_parameters(*layer, group); }),
                AllOf(HasSubstr("rank 0: broadcast_parameters of 6 numbers"),
                      HasSubstr("rank 1: broadcast_parameters of 9 numbers")));
  });
}

TEST(DataParallel, ARankWithoutNumbersIsOneWithADifferentModule) {
  run_ranks(2, [](const RankGroup& group) {
    torch::nn::Linear layer(2, 2);
    torch::nn::Sequential net(layer), none;
    for (const at::Tensor& parameter : layer->parameters()) {
      parameter.set_requires_grad(group.rank() == 0);
    }

    EXPECT_THAT(text_of<MismatchError>([&] { nn::average_gradients(*net, group); }),
                HasSubstr("rank 1: average_gradients of 0 numbers"));
    EXPECT_THAT(text_of<MismatchError>(
                    [&] { nn::broadcast_parameters(group.rank() == 0 ? *net : *none, group); }),
                HasSubstr("rank 1: broadcast_parameters of 0 numbers"));
    EXPECT_NO_THROW(nn::broadcast_parameters(*none, group));
  });
}

TEST(DataParallel, RanksWithMoreMessagesThanOthersAllGetAnErrorBeforeTheFirst) {
  run_ranks(2, [](const RankGroup& group) {
    torch::nn::Linear layer(256, 256);  // a message for the weight, and one for the bias
    torch::nn::Linear without_bias(torch::nn::LinearOptions(256, 256).bias(false));
    torch::nn::Module& module = group.rank() == 0 ? *layer : *without_bias;
    const at::Tensor before = module.parameters()[0].clone();

    EXPECT_THROW(nn::broadcast_parameters(module, group), MismatchError);
    EXPECT_TRUE(torch::equal(module.parameters()[0], before));
  });
}

// A few hundred float64 roundings (2e-16) of numbers near one, over five steps.
constexpr double kRoundingOfTraining = 1e-12;

TEST(DataParallel, RanksTrainAsOneProcessWithAllSamples) {
  constexpr int kRanks = 3;
  const at::Tensor all_x = torch::randn({2 * kRanks, 6}, torch::kDouble) + 3;
  const at::Tensor all_targets = torch::randn({2 * kRanks, 2}, torch::kDouble);
  torch::nn::Sequential whole = trained_network();
  whole->to(torch::kDouble);
  std::stringstream start;
  torch::save(whole, start);
  const auto train = [](torch::nn::Sequential& net, const at::Tensor& x, const at::Tensor& target,
                        const auto& average) {
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      torch::nn::functional::mse_loss(net->forward(x), target).backward();
      average();
      optimizer.step();
    }
  };
  train(whole, all_x, all_targets, [] {});

  run_ranks(kRanks, [&](const RankGroup& group) {
    torch::nn::Sequential net = trained_network();
    net->to(torch::kDouble);
    if (group.rank() == 0) torch::load(net, start);
    nn::broadcast_parameters(*net, group);
    nn::convert(*net, Scope::world(), group);
    const std::int64_t begin = 2 * group.rank();

    train(net, all_x.slice(0, begin, begin + 2), all_targets.slice(0, begin, begin + 2),
          [&] { nn::average_gradients(*net, group); });

    for (const auto& [name, parameter] : whole->named_parameters().pairs()) {
      EXPECT_TRUE(torch::allclose(net->named_parameters()[name], parameter, kRoundingOfTraining,
                                  kRoundingOfTraining))
          << name;
    }
    for (const auto& [name, buffer] : whole->named_buffers().pairs()) {
      EXPECT_TRUE(torch::allclose(net->named_buffers()[name].to(torch::kDouble), buffer,
                                  kRoundingOfTraining, kRoundingOfTraining))
          << name;
    }
  });
}

}  // namespace
}  // namespace normscope::testing
