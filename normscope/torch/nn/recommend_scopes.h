// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>

#include <torch/arg.h>
#include <torch/nn/module.h>

#include "normscope/core/export.h"
#include "normscope/torch/nn/scope_plan.h"
#include "normscope/torch/rank_group.h"

namespace normscope {
namespace nn NORMSCOPE_EXPORT {

struct RecommendOptions {
  // That a norm batch should be worth, at least 2.
  TORCH_ARG(double, independent_values) = kDefaultIndependentValues;
  // In a group of one rank, the number of ranks that parts of each batch stand for: what would they
  // need?
  TORCH_ARG(std::int64_t, ranks) = 1;
};

// Measures which scope each layer of normscope in `module` needs, as Python's recommend_scopes
// does: forward(0) ... forward(batches - 1) run it over a few batches on all ranks of the group,
// every layer under scope `world` and without gradients. Collective over the group; all ranks get
// the same plan.
//
// Nothing of the module changes: parameters, buffers, modes, scopes and the state of torch's
// generators are put back, also where `forward` throws. Batch normalization runs with the
// statistics of the batch, everything else in the mode that it is in.
//
// Throws ArgumentError where the wanted number is below 2 or NaN, there is no batch, the module has
// no layer of normscope, the ranks differ in layers, batches or wanted numbers, a batch has fewer
// samples than it is cut into parts, or a layer was given what is not finite. What `forward` throws
// on one rank ends the wait of the others.
[[nodiscard]] ScopePlan recommend_scopes(::torch::nn::Module& module, std::int64_t batches,
                                         const std::function<void(std::int64_t batch)>& forward,
                                         const RankGroup& group,
                                         const RecommendOptions& options = {});

}  // namespace nn
}  // namespace normscope
