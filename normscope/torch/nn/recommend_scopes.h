// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/module.h>

#include "normscope/core/attributes.h"
#include "normscope/torch/groups/rank_group.h"
#include "normscope/torch/nn/scope_plan.h"

namespace normscope {
namespace nn NORMSCOPE_EXPORT {

struct RecommendOptions {
  // The share of the outputs' variance that all narrower statistics together may add, at least 0.
  TORCH_ARG(double, noise) = kDefaultOutputNoise;
  // Only for a group of one rank: cuts each batch into this number of parts, and makes a plan for
  // as many ranks.
  TORCH_ARG(std::int64_t, ranks) = 1;
};

// Runs the module on a batch and returns its outputs, those without a gradient too.
using Forward = std::function<std::vector<at::Tensor>(std::int64_t batch)>;

// Measures which scope each layer of normscope in training in `module` needs, as Python's
// recommend_scopes does, in a module that has begun to train. forward(0) ... forward(batches - 1)
// must run the module over a few batches, on all ranks of the group. The measured layers run with
// scope `world`, forward and backward. Collective over the group; all ranks get the same plan.
//
// The module is left unchanged: parameters, gradients, buffers, modes, scopes and the state of
// torch's generators are restored, even if `forward` throws. Everything runs in its current mode:
// layers in evaluation, such as frozen ones, normalize with their running statistics.
//
// Throws ArgumentError if the wanted noise is negative or NaN, there is no batch or no `forward`,
// the module has no layer of normscope in training, no output has a gradient, the ranks differ in
// layers, batches or wanted noise, a batch has fewer samples than parts, or the input of a layer is
// not finite. If `forward` throws on one rank, the others stop waiting.
[[nodiscard]] ScopePlan recommend_scopes(::torch::nn::Module& module, std::int64_t batches,
                                         const Forward& forward, const RankGroup& group,
                                         const RecommendOptions& options = {});

}  // namespace nn
}  // namespace normscope
