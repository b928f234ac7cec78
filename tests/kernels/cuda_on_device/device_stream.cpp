// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/device_stream.h"

#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include <cuda_runtime.h>

namespace normscope::testing {
namespace {

// Kernels of one stream wait for kernels of another, which must be able to start. Before CUDA
// starts: by default it loads a kernel at its first launch, and may wait for the device then.
[[maybe_unused]] const int kLoaded = setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/1);

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
}

// Streams that nobody uses. CUDA puts streams into few queues, one after the other as they are
// made. As many as are used at the same time have queues of their own if none is made twice.
class UnusedStreams {
 public:
  cudaStream_t take() {
    const std::lock_guard lock(mutex_);
    cudaStream_t stream = nullptr;
    if (streams_.empty()) {
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    } else {
      stream = streams_.back();
      streams_.pop_back();
    }
    return stream;
  }

  void give_back(cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    streams_.push_back(stream);
  }

 private:
  std::mutex mutex_;
  std::vector<cudaStream_t> streams_;
};

// Never destroyed: CUDA may end before it, and the tests' memory with it.
UnusedStreams& unused_streams() {
  static auto& streams = *new UnusedStreams;
  return streams;
}

cudaStream_t handle_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace

DeviceStream::DeviceStream()
    : stream_{.handle = unused_streams().take(), .memory = Memory::kDevice} {}

// Errors have been thrown where they were found.
DeviceStream::~DeviceStream() {
  (void)cudaStreamSynchronize(handle_of(stream_));
  unused_streams().give_back(handle_of(stream_));
}

void DeviceStream::wait() const {
  check(cudaStreamSynchronize(handle_of(stream_)), "cudaStreamSynchronize");
}

std::function<void()> DeviceStream::capture(const std::function<void()>& queue_work) const {
  const cudaStream_t stream = handle_of(stream_);
  // Relaxed: the tests' allocations may ask CUDA for memory meanwhile.
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
  queue_work();
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  cudaGraphExec_t executable = nullptr;
  check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  const std::shared_ptr<CUgraphExec_st> kept(executable, cudaGraphExecDestroy);
  return [stream, kept] { check(cudaGraphLaunch(kept.get(), stream), "cudaGraphLaunch"); };
}

}  // namespace normscope::testing
