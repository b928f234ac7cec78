// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>

#include "normscope/torch/nn/batch_norm.h"

namespace normscope::nn {

// The options of a layer of normscope; nullptr for any other module.
inline BatchNormOptions* options_of(::torch::nn::Module& module) {
  if (auto* layer = dynamic_cast<BatchNorm1dImpl*>(&module)) return &layer->options;
  if (auto* layer = dynamic_cast<BatchNorm2dImpl*>(&module)) return &layer->options;
  if (auto* layer = dynamic_cast<BatchNorm3dImpl*>(&module)) return &layer->options;
  return nullptr;
}

}  // namespace normscope::nn
