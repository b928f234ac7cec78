// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>
#include <string>

#include <cuda_runtime.h>

#include "tests/comm/on_device/sum_over_ranks.cuh"

namespace normscope::testing {

void queue_sum_over_ranks(Stream stream, const SharedSlots& shared, int rank, double* values,
                          std::int64_t size) {
  constexpr int kBlocks = 1;
  constexpr int kThreads = 256;
  cuda::sum_over_ranks<<<kBlocks, kThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(
      shared, rank, values, size);
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("sum_over_ranks: ") + cudaGetErrorString(error));
}

}  // namespace normscope::testing
