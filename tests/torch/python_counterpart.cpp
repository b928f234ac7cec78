// SPDX-License-Identifier: Apache-2.0
//
// usage: python_counterpart <scope> <start> <inputs> <outputs> <end>
//
// What compare_with_python.py has a C++ program do: from a checkpoint of a layer, one step with
// some inputs; what came out, and the layer's checkpoint after it.
#include <cstdio>
#include <exception>
#include <span>

#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include "normscope/torch/nn/batch_norm.h"
#include "normscope/torch/nn/checkpoint.h"

namespace {

using normscope::nn::load_state_dict;
using normscope::nn::save_state_dict;

// Tensors under names.
struct Tensors : torch::nn::Module {
  // By value: the module moves the tensors that it holds when it gets another.
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

}  // namespace

int main(int argc, char** argv) {
  try {
    step(std::span(argv, static_cast<std::size_t>(argc)).subspan(1));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "python_counterpart: %s\n", error.what());
    return 1;
  }
}
