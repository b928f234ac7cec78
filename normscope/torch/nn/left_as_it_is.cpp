// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/nn/left_as_it_is.h"

#include <mutex>
#include <set>
#include <utility>

#include <ATen/Context.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

namespace normscope::nn {
namespace {

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
    layers_.push_back({layer, layer.options->scope(), layer.observed->observer});
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
}

LeftAsItIs::~LeftAsItIs() {
  const c10::InferenceMode may_write_to_inference_tensors;
  for (auto& [layer, scope, observer] : layers_) {
    layer.options->scope(scope);
    layer.observed->observer = std::move(observer);
  }
  for (const auto& [buffer, value] : buffers_) buffer.resize_(value.sizes()).copy_(value);
  for (auto& [generator, state] : generators_) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

}  // namespace normscope::nn
