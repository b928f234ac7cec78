// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/nn/left_as_it_is.h"

#include <mutex>
#include <ranges>
#include <set>

#include <ATen/Context.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/batchnorm.h>

namespace normscope::nn {
namespace {

bool is_batch_norm(::torch::nn::Module& module) {
  return options_of(module) != nullptr ||
         dynamic_cast<::torch::nn::BatchNorm1dImpl*>(&module) != nullptr ||
         dynamic_cast<::torch::nn::BatchNorm2dImpl*>(&module) != nullptr ||
         dynamic_cast<::torch::nn::BatchNorm3dImpl*>(&module) != nullptr;
}

// torch's default generators, of the host and of the devices that the parameters are on.
std::vector<at::Generator> generators_of(const ::torch::nn::Module& module) {
  std::vector<at::Generator> generators = {at::globalContext().defaultGenerator(at::kCPU)};
  std::set<c10::DeviceIndex> seen;
  for (const at::Tensor& parameter : module.parameters()) {
    if (!parameter.is_cuda() || !seen.insert(parameter.get_device()).second) continue;
    generators.push_back(at::globalContext().defaultGenerator(parameter.device()));
  }
  return generators;
}

}  // namespace

LeftAsItIs::LeftAsItIs(::torch::nn::Module& module) {
  for (const NamedLayer& layer : named_layers(module)) {
    layers_.push_back({layer, layer.options->scope()});
  }
  std::vector<at::Generator> generators = generators_of(module);
  const at::NoGradGuard no_grad;
  for (const at::Tensor& buffer : module.buffers()) {
    if (buffer.defined()) buffers_.emplace_back(buffer, buffer.clone());
  }
  for (at::Generator& generator : generators) {
    const std::lock_guard lock(generator.mutex());
    generators_.emplace_back(generator, generator.get_state());
  }
  module.apply([this](::torch::nn::Module& each) {
    if (!is_batch_norm(each)) return;
    modes_.emplace_back(&each, each.is_training());
    each.train();
  });
}

LeftAsItIs::~LeftAsItIs() {
  const at::NoGradGuard no_grad;
  for (const auto& [layer, scope] : layers_) {
    layer.options->scope(scope);
    layer.observed->input_observer = nullptr;
  }
  // In reverse: a layer that is listed twice was already in training the second time.
  for (const auto& [module, mode] : std::views::reverse(modes_)) module->train(mode);
  for (const auto& [buffer, value] : buffers_) buffer.copy_(value);
  for (auto& [generator, state] : generators_) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

}  // namespace normscope::nn
