// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/kernels_under_test.h"

#include <stdexcept>
#include <string>
#include <type_traits>

#include <cuda_runtime.h>

#include "tests/kernels/cuda_on_device/kernels_of_device.h"
#include "tests/kernels/device_as_host.h"

namespace normscope::testing {
namespace {

// Not for the device: kernels of other streams may wait for what this thread has yet to queue.
void wait_for(Stream stream) {
  if (kernels_of_device().is_capturing(stream)) return;
  const cudaError_t error = cudaStreamSynchronize(static_cast<cudaStream_t>(stream.handle));
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("the device: ") + cudaGetErrorString(error));
  }
}

template <auto kFunction>
struct Waiting;
template <class Result, class... Arguments,
          Result (*DeviceKernels::*kFunction)(Stream, Arguments...)>
struct Waiting<kFunction> {
  static Result run(Stream stream, Arguments... arguments) {
    if constexpr (std::is_void_v<Result>) {
      (kernels_of_device().*kFunction)(stream, arguments...);
      wait_for(stream);
    } else {
      const Result result = (kernels_of_device().*kFunction)(stream, arguments...);
      wait_for(stream);
      return result;
    }
  }
};

constinit const DeviceKernels kDeviceKernels = {
    .name = "cuda",
    .why_not = [] { return kernels_of_device().why_not(); },
    .is_capturing = [](Stream stream) { return kernels_of_device().is_capturing(stream); },
    .new_zeros = [](Stream stream,
                    std::int64_t size) { return kernels_of_device().new_zeros(stream, size); },
    .moments = Waiting<&DeviceKernels::moments>::run,
    .send_moments = Waiting<&DeviceKernels::send_moments>::run,
    .exchange_moments =
        [](Stream stream, const TensorView& x, DeviceScratch scratch, const UseOfMoments& use,
           const MutableTensorView& y, const MessageView& message, const Header& header,
           const PeerMemory& peers) {
          return kernels_of_device().exchange_moments(stream, x, scratch, use, y, message, header,
                                                      peers);
        },
    .use_moments = Waiting<&DeviceKernels::use_moments>::run,
    .use_statistics = Waiting<&DeviceKernels::use_statistics>::run,
    .normalize = Waiting<&DeviceKernels::normalize>::run,
    .gradient_sums = Waiting<&DeviceKernels::gradient_sums>::run,
    .send_gradient_sums = Waiting<&DeviceKernels::send_gradient_sums>::run,
    .exchange_gradient_sums =
        [](Stream stream, const TensorView& x, const TensorView& dy, DeviceScratch scratch,
           const UseOfGradientSums& use, const MutableTensorView& dx, const MessageView& message,
           const Header& header, const PeerMemory& peers) {
          return kernels_of_device().exchange_gradient_sums(stream, x, dy, scratch, use, dx,
                                                            message, header, peers);
        },
    .use_gradient_sums = Waiting<&DeviceKernels::use_gradient_sums>::run,
    .input_gradient = Waiting<&DeviceKernels::input_gradient>::run,
    .activation_gradient = Waiting<&DeviceKernels::activation_gradient>::run,
    .gradient_of_output = Waiting<&DeviceKernels::gradient_of_output>::run,
    .peers = {.allocate = nullptr, .open = nullptr, .allocate_word = nullptr, .order = nullptr},
};

constinit const Kernels kKernels = DeviceAsHost<device_kernels_under_test>::kernels("cuda");

}  // namespace

const DeviceKernels& device_kernels_under_test() { return kDeviceKernels; }

std::vector<const Kernels*> kernels_under_test() { return {&kKernels}; }

std::vector<const Kernels*> kernels_with_equal_bits() { return kernels_under_test(); }

// Sizes around packs, warps, groups, tiles and blocks; several blocks for one channel; grids that
// occupy every multiprocessor of a GPU. The host computes all of it again, one element at a time,
// so shapes are as small as possible.
std::vector<Shape> shapes_under_test() {
  return {
      {1, 3, 64},    {1, 40, 65},  {2, 3, 2049},  {2, 5, 2048},     {2, 64, 130},
      {3, 37, 7},    {40, 9, 1},   {9, 33, 49},   {2, 17, 33 * 33}, {1, 3, 129 * 129},
      {1000, 70, 1}, {6, 72, 196}, {1, 1, 70001}, {300, 3, 31},
  };
}

}  // namespace normscope::testing
