// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "normscope/torch/nn/layers.h"

namespace normscope::nn {

// Remembers the state of a module, and restores it when this object is destroyed.
class LeftAsItIs {
 public:
  explicit LeftAsItIs(::torch::nn::Module& module);
  LeftAsItIs(const LeftAsItIs&) = delete;
  LeftAsItIs& operator=(const LeftAsItIs&) = delete;
  ~LeftAsItIs();

 private:
  struct Layer {
    NamedLayer layer;
    Scope scope;
    decltype(Observed::observer) observer;
  };

  std::vector<Layer> layers_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;        // with their values
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;  // with their states
};

}  // namespace normscope::nn
