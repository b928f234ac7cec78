// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>

#include "normscope/core/attributes.h"
#include "normscope/torch/groups/rank_group.h"

namespace normscope {
namespace nn NORMSCOPE_EXPORT {

// Data parallelism in two calls. Every rank has a replica of the module, trains it on samples of
// its own, and steps its own optimizer. Both calls are collective over the group. Numbers travel as
// float64, in buckets.
//
// Both throw MismatchError on every rank if the ranks' modules differ in size, and the errors of
// RankGroup::all_reduce().

// Gives all ranks the parameters and buffers of rank 0. Integers beyond 2^53 are rounded.
void broadcast_parameters(::torch::nn::Module& module, const RankGroup& group);

// Replaces every gradient by its mean over the ranks, a sparse one by a dense one. Call it after
// backward and before the optimizer's step. A rank without a gradient that others have counts as
// zero. A gradient that no rank has stays undefined.
void average_gradients(::torch::nn::Module& module, const RankGroup& group);

}  // namespace nn
}  // namespace normscope
