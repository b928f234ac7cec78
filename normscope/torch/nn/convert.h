// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>

#include "normscope/core/attributes.h"
#include "normscope/core/scope.h"
#include "normscope/torch/groups/rank_group.h"

namespace normscope {
namespace nn NORMSCOPE_EXPORT {

// Gives the batch normalization layers below `module` a scope among the ranks of `group`. torch's
// BatchNorm1d, 2d and 3d are replaced by normscope's layers with the same parameters, and
// optimizers made before keep working. Classes that derive from them stay as they are. Layers of
// normscope get the scope and the group. Each layer learns its qualified name and, if other models
// of the group have it, the number of its model. A model that is converted again for the same group
// gets a new number.
//
// Layers in a torch::nn::Sequential, ModuleList or ModuleDict can always be replaced. A layer that
// a module of another class has registered can be replaced only if nothing but the registry holds
// it: a member variable would keep using the old layer. A layer in several places stays one layer.
//
// Throws ArgumentError, which names the layer and says what to do, if a layer cannot be replaced,
// or if `module` itself is torch's layer. Nothing is changed then. Warns if there is no such layer.
void convert(::torch::nn::Module& module, const Scope& scope, const RankGroup& group);

// Changes which ranks share statistics, in all layers of normscope in `module`. Call it between
// steps.
//
// Throws ArgumentError if there is no such layer.
void set_scope(::torch::nn::Module& module, const Scope& scope);

}  // namespace nn
}  // namespace normscope
