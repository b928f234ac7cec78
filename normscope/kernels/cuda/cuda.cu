// SPDX-License-Identifier: Apache-2.0
#include "normscope/kernels/cuda/cuda.h"

#include <cuda_runtime.h>

#include "normscope/kernels/cuda/backend.h"

namespace normscope::cuda {
namespace {

int attribute_of_current_device(cudaDeviceAttr attribute) {
  int device = 0;
  int value = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) return 0;
  return value;
}

// The device that is current for the calling thread.
struct CurrentDevice {
  static int multiprocessors() {
    return std::max(1, attribute_of_current_device(cudaDevAttrMultiProcessorCount));
  }
  static std::int64_t cache_bytes() {
    return std::max(1, attribute_of_current_device(cudaDevAttrL2CacheSize));
  }

  static void clear(Stream stream, double* numbers, std::int64_t size) {
    cudaMemsetAsync(numbers, 0, static_cast<std::size_t>(size) * sizeof(double),
                    static_cast<cudaStream_t>(stream.handle));
  }

  // Errors of a launch stay with the runtime, where the next call that can fail finds them.
  template <class Kernel, class... Arguments>
  static void launch(Stream stream, Grid grid, Kernel kernel, Arguments... arguments) {
    const dim3 blocks(static_cast<unsigned>(grid.blocks_x), static_cast<unsigned>(grid.blocks_y));
    const dim3 threads(static_cast<unsigned>(grid.threads_x),
                       static_cast<unsigned>(grid.threads_y));
    kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream.handle)>>>(arguments...);
  }
};

bool has_device() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

}  // namespace

const Kernels kKernels = Backend<CurrentDevice>::kernels("cuda", has_device);

}  // namespace normscope::cuda
