// SPDX-License-Identifier: Apache-2.0
//
// usage: python_counterpart <scope> <start> <inputs> <outputs> <end>
//        python_counterpart <inputs>
//
// What compare_with_python.py makes a C++ program do: load a checkpoint of a layer, take one step
// with some inputs, and save the results and the layer's new checkpoint. Or make a plan from some
// inputs.
#include <cstdio>
#include <exception>
#include <span>
#include <vector>

#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include "normscope/comm/self_communicator.h"
#include "normscope/torch/nn/batch_norm.h"
#include "normscope/torch/nn/checkpoint.h"
#include "normscope/torch/nn/recommend_scopes.h"

namespace {

using normscope::nn::load_state_dict;
using normscope::nn::save_state_dict;

// Named tensors.
struct Tensors : torch::nn::Module {
  // By value: the module moves its tensors when it gets another.
  at::Tensor add(const char* name, const at::Tensor& tensor) {
    return register_buffer(name, tensor);
  }
};

void step(std::span<char*> arguments) {
  const auto scope = normscope::Scope::parse(arguments[0]);
  torch::nn::Sequential net(
      normscope::nn::BatchNorm2d(normscope::nn::BatchNormOptions(3).scope(scope)));
  load_state_dict(*net, arguments[1]);
  Tensors inputs, outputs;
  const at::Tensor x = inputs.add("x", torch::empty({4, 3, 5, 6}));
  const at::Tensor dy = inputs.add("dy", torch::empty({4, 3, 5, 6}));
  load_state_dict(inputs, arguments[2]);

  x.requires_grad_();
  const at::Tensor y = net->forward(x);
  y.backward(dy);

  outputs.add("y", y.detach());
  outputs.add("dx", x.grad());
  outputs.add("dweight", net->parameters()[0].grad());
  outputs.add("dbias", net->parameters()[1].grad());
  save_state_dict(outputs, arguments[3]);
  save_state_dict(*net, arguments[4]);
}

void recommend(const char* inputs_path) {
  Tensors inputs;
  const at::Tensor x = inputs.add("x", torch::empty({6, 8, 3, 5, 6}));
  load_state_dict(inputs, inputs_path);
  torch::nn::Sequential net(normscope::nn::BatchNorm2d(3), normscope::nn::BatchNorm2d(3));

  const auto plan = normscope::nn::recommend_scopes(
      *net, x.size(0), [&](std::int64_t batch) { return std::vector{net->forward(x[batch])}; },
      normscope::RankGroup(normscope::make_self_communicator()),
      normscope::nn::RecommendOptions().ranks(4));

  std::printf("%a %d %d %d\n", plan.noise.mean, static_cast<int>(plan.ranks),
              static_cast<int>(plan.batches), static_cast<int>(plan.bytes_per_step()));
  for (const auto& layer : plan.layers) {
    std::printf("%s %d %s", layer.layer.c_str(), static_cast<int>(layer.channels),
                plan.chosen(layer).scope.str().c_str());
    for (const double noise : layer.noise) std::printf(" %a", noise);
    std::printf("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto arguments = std::span(argv, static_cast<std::size_t>(argc)).subspan(1);
    if (arguments.size() == 1) {
      recommend(arguments[0]);
    } else {
      step(arguments);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "python_counterpart: %s\n", error.what());
    return 1;
  }
}
