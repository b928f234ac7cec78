// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>

#include "normscope/core/export.h"
#include "normscope/core/scope.h"
#include "normscope/torch/rank_group.h"

namespace normscope {
namespace nn NORMSCOPE_EXPORT {

// Gives the batch normalization layers below `module` a scope among the ranks of `group`. torch's
// BatchNorm1d, 2d and 3d are replaced by normscope's, with the same parameters, so that an
// optimizer made before keeps working; layers of normscope get the scope and the group. Each layer
// learns its qualified name.
//
// Layers in a torch::nn::Sequential can always be replaced. One that a module of another class has
// registered can where the registry alone holds it; a member variable would go on with the old
// layer.
//
// Throws ArgumentError, which names the layer and says what to do, where one cannot be replaced,
// and where `module` itself is torch's layer; nothing has been changed then. Warns where there is
// no such layer.
void convert(::torch::nn::Module& module, const Scope& scope, const RankGroup& group);

// Changes who shares statistics in all layers of normscope in `module`, between two steps.
//
// Throws ArgumentError where there is no such layer.
void set_scope(::torch::nn::Module& module, const Scope& scope);

}  // namespace nn
}  // namespace normscope
