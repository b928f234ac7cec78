// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <cuda_runtime.h>

#include "normscope/core/error.h"

namespace normscope::nccl {

inline void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw CommunicationError(std::string("nccl: ") + call + ": " + cudaGetErrorString(error));
}

// Makes `device` the calling thread's current device for the lifetime of this object.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

// Device memory and a stream, for the sum of a message in host memory.
class Staging {
 public:
  explicit Staging(std::size_t bytes) {
    check_cuda(cudaMalloc(&memory_, bytes), "cudaMalloc");
    const cudaError_t error = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
    if (error != cudaSuccess) cudaFree(memory_);
    check_cuda(error, "cudaStreamCreate");
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging() {
    cudaStreamDestroy(stream_);
    cudaFree(memory_);
  }

  [[nodiscard]] void* memory() const noexcept { return memory_; }
  [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }

 private:
  void* memory_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

}  // namespace normscope::nccl
