// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/kernels_under_test.h"

#include <stdexcept>
#include <string>

#include <cuda_runtime.h>

namespace normscope::testing {
namespace {

void wait_for_device() {
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("the device: ") + cudaGetErrorString(error));
  }
}

// A kernel of the device that has ended when it returns, as those of the host have.
template <auto kFunction>
struct Waiting;
template <class... Arguments, void (*Kernels::*kFunction)(Arguments...)>
struct Waiting<kFunction> {
  static void run(Arguments... arguments) {
    (device_kernels()->*kFunction)(arguments...);
    wait_for_device();
  }
};

constinit const Kernels kKernels = {
    .name = "cuda",
    .can_run = [] { return device_kernels()->can_run(); },
    .channels_per_chunk =
        [](const TensorView& x, int tensors, int threads) {
          return device_kernels()->channels_per_chunk(x, tensors, threads);
        },
    .add_moments = Waiting<&Kernels::add_moments>::run,
    .finalize_moments = Waiting<&Kernels::finalize_moments>::run,
    .normalize = Waiting<&Kernels::normalize>::run,
    .add_gradient_sums = Waiting<&Kernels::add_gradient_sums>::run,
    .finalize_gradient_sums = Waiting<&Kernels::finalize_gradient_sums>::run,
    .input_gradient = Waiting<&Kernels::input_gradient>::run,
    .clear = Waiting<&Kernels::clear>::run,
    .set_cumulative_momentum = Waiting<&Kernels::set_cumulative_momentum>::run,
    .seal = Waiting<&Kernels::seal>::run,
};

}  // namespace

std::vector<const Kernels*> kernels_under_test() { return {&kKernels}; }

std::vector<const Kernels*> kernels_with_equal_bits() { return kernels_under_test(); }

// Around packs, warps, groups, tiles and blocks; several blocks for one channel, and grids that
// every multiprocessor of a GPU has a part of.
std::vector<Shape> shapes_under_test() {
  return {
      {1, 3, 64},    {1, 40, 65},    {2, 3, 2049},  {2, 5, 2048},      {2, 64, 130},
      {3, 37, 7},    {40, 9, 1},     {9, 33, 49},   {2, 257, 33 * 33}, {2, 19, 129 * 129},
      {4096, 70, 1}, {32, 512, 196}, {1, 1, 70001}, {300, 3, 31},
  };
}

}  // namespace normscope::testing
