// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/kernels_under_test.h"

#include "tests/kernels/cuda_on_host/backend.h"
#include "tests/kernels/device_as_host.h"

namespace normscope::testing {
namespace {

constinit const Kernels kKernels = DeviceAsHost<device_kernels_under_test>::kernels("cuda_on_host");

}  // namespace

const DeviceKernels& device_kernels_under_test() { return cuda_on_host::kKernels; }

std::vector<const Kernels*> kernels_under_test() { return {&kKernels}; }

std::vector<const Kernels*> kernels_with_equal_bits() { return kernels_under_test(); }

// A device's threads are slow on the host: few shapes, each of which adds a case.
std::vector<Shape> shapes_under_test() {
  return {
      {1, 3, 64},    // one tile per channel, of whole lanes
      {1, 40, 65},   // and one element more; more channels than a block's groups
      {2, 3, 2049},  // several tiles per sample, the last one of one element
      {2, 5, 2048},  // packs
      {2, 64, 130},  // packs of channels
      {3, 37, 7},    // planes and rows that start anywhere
      {40, 9, 1},    // single elements
  };
}

}  // namespace normscope::testing
