// SPDX-License-Identifier: Apache-2.0
//
// So many ranks with torch's kernels that they add sums instead of gathering statistics.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "normscope/torch/nn/batch_norm.h"
#include "tests/support/text_of.h"
#include "tests/torch/groups.h"

namespace normscope::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kRanks = 66;

nn::BatchNorm1d layer_of(const RankGroup& group) {
  return nn::BatchNorm1d(nn::BatchNormOptions(3).group(group.name()));
}

TEST(ManyRanks, TrainAsTorchOnTheJoinedSamples) {
  const at::Tensor batch = torch::randn({kRanks, 3}, torch::kDouble);
  torch::nn::BatchNorm1d theirs(3);
  theirs->to(torch::kDouble);
  const at::Tensor expected = theirs->forward(batch);

  run_ranks(kRanks, [&](const RankGroup& group) {
    nn::BatchNorm1d layer = layer_of(group);
    layer->to(torch::kDouble);
    const at::Tensor y = layer->forward(batch.narrow(0, group.rank(), 1));
    // Float64 on data of condition one.
    EXPECT_TRUE(torch::allclose(y, expected.narrow(0, group.rank(), 1), 1e-12, 1e-12));
    EXPECT_TRUE(torch::allclose(layer->running_var, theirs->running_var, 1e-12, 1e-12));
  });
}

TEST(ManyRanks, WithoutElementsHaveGradientsOfZeroAndUpdateNothing) {
  run_ranks(kRanks, [](const RankGroup& group) {
    nn::BatchNorm1d layer = layer_of(group);
    layer->forward(torch::empty({0, 3}).requires_grad_()).sum().backward();
    EXPECT_TRUE(layer->weight.grad().equal(torch::zeros({3}))) << layer->weight.grad();
    EXPECT_TRUE(layer->running_mean.equal(torch::zeros({3})));
    EXPECT_EQ(layer->num_batches_tracked.item<std::int64_t>(), 0);
  });
}

TEST(ManyRanks, OneValuePerChannelIsRefusedAndUpdatesNothing) {
  run_ranks(kRanks, [](const RankGroup& group) {
    nn::BatchNorm1d layer = layer_of(group);
    const at::Tensor x = torch::ones({group.rank() == 7 ? 1 : 0, 3});
    EXPECT_THAT(text_of<c10::ValueError>([&] { layer->forward(x); }),
                HasSubstr("Expected more than 1 value per channel when training"));
    EXPECT_TRUE(layer->running_var.equal(torch::ones({3})));
    EXPECT_TRUE(layer->forward(torch::randn({2, 3})).isfinite().all().item<bool>());
  });
}

}  // namespace
}  // namespace normscope::testing
