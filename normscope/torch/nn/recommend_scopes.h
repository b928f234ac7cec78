// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>

#include <torch/arg.h>
#include <torch/nn/module.h>

#include "normscope/core/attributes.h"
#include "normscope/torch/groups/rank_group.h"
#include "normscope/torch/nn/scope_plan.h"

namespace normscope {
namespace nn NORMSCOPE_EXPORT {

struct RecommendOptions {
  // The independent values that a norm batch should be worth, at least 2.
  TORCH_ARG(double, independent_values) = kDefaultIndependentValues;
  // Only for a group of one rank: cuts each batch into this number of parts, and makes a plan for
  // as many ranks.
  TORCH_ARG(std::int64_t, ranks) = 1;
};

// Measures which scope each layer of normscope in training in `module` needs, as Python's
// recommend_scopes does. forward(0) ... forward(batches - 1) must run the module over a few
// batches, on all ranks of the group. The measured layers run with scope `world` and without
// gradients. Collective over the group; all ranks get the same plan.
//
// The module is left unchanged: parameters, buffers, modes, scopes and the state of torch's
// generators are restored, even if `forward` throws. Everything runs in its current mode: layers in
// evaluation, such as frozen ones, normalize with their running statistics.
//
// Throws ArgumentError if the wanted number is below 2 or NaN, there is no batch, the module has no
// layer of normscope in training, the ranks differ in layers, batches or wanted numbers, a batch
// has fewer samples than parts, or the input of a layer is not finite. If `forward` throws on one
// rank, the others stop waiting.
[[nodiscard]] ScopePlan recommend_scopes(::torch::nn::Module& module, std::int64_t batches,
                                         const std::function<void(std::int64_t batch)>& forward,
                                         const RankGroup& group,
                                         const RecommendOptions& options = {});

}  // namespace nn
}  // namespace normscope
