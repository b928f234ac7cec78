// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>

#include "normscope/core/export.h"
#include "normscope/torch/rank_group.h"

namespace normscope {
namespace nn NORMSCOPE_EXPORT {

// Data parallelism in two calls: every rank has a replica of the module, trains it on samples of
// its own, and steps its own optimizer. Both are collective over the group. Numbers travel as
// float64, in buckets.
//
// Both throw MismatchError on every rank where the ranks' modules differ in size, and what
// RankGroup::all_reduce throws.

// Gives all ranks the parameters and buffers of rank 0. Integers beyond 2^53 would be rounded.
void broadcast_parameters(::torch::nn::Module& module, const RankGroup& group);

// Replaces every gradient by its mean over the ranks, after backward and before the optimizer's
// step. A rank without a gradient that others have counts as zero; where no rank has one there is
// none after.
void average_gradients(::torch::nn::Module& module, const RankGroup& group);

}  // namespace nn
}  // namespace normscope
