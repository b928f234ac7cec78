// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>
#include <vector>

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

// A layer of normscope in a module.
struct NamedLayer {
  std::string name;  // qualified
  ::torch::nn::Module* module;
  BatchNormOptions* options;
  Observed* observed;
};

// The layers of normscope in a module, in the module's order, each once.
inline std::vector<NamedLayer> named_layers(::torch::nn::Module& module) {
  std::vector<NamedLayer> layers;
  module.apply([&](const std::string& name, ::torch::nn::Module& each) {
    BatchNormOptions* options = options_of(each);
    const bool is_known = std::ranges::count(layers, options, &NamedLayer::options) > 0;
    if (options != nullptr && !is_known) {
      layers.push_back({name, &each, options, dynamic_cast<Observed*>(&each)});
    }
  });
  return layers;
}

}  // namespace normscope::nn
