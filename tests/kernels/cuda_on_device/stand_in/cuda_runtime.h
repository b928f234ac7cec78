// SPDX-License-Identifier: Apache-2.0
//
// What the suites of a device need of CUDA's runtime, for machines without one: host memory serves
// as managed memory. Refuses what would take a real runtime longer than gpu_check.py allows.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>

// NOLINTBEGIN(readability-identifier-naming): the names are CUDA's.
enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "out of memory";
}

// A thousand calls of a millisecond each take a second.
inline cudaError_t cudaMallocManaged(void** memory, std::size_t bytes) {
  static constinit std::atomic<int> calls = 0;
  constexpr int kMostCalls = 1000;
  *memory = ++calls > kMostCalls ? nullptr : std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

using cudaStream_t = void*;

inline cudaError_t cudaStreamSynchronize(cudaStream_t /*stream*/) { return cudaSuccess; }
// NOLINTEND(readability-identifier-naming)
