// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include "tests/support/ranks.h"

// An implementation on the host of those NCCL and CUDA functions that the communicator over NCCL
// calls. A stream is a thread that does its work in order, device memory is host memory, a rank is
// a thread. Sums and errors follow the documentation of both; speed does not.
namespace normscope::nccl_on_host {

// Creates a stream and destroys it with this object.
class Stream {
 public:
  Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream();

  [[nodiscard]] cudaStream_t get() const noexcept { return stream_; }

  // Queues work that ends when the gate opens.
  void wait_at(testing::Gate& gate);

  // From now on, work on the stream is captured into a graph and does not run. The mode is CUDA's
  // default, global: no thread may make unsafe calls during the capture, unless it has chosen the
  // relaxed mode for itself.
  void capture();

  // Whether no unsafe call has been made since capture().
  [[nodiscard]] bool capture_is_valid() const;

 private:
  cudaStream_t stream_ = nullptr;
};

// Makes ncclCommGetAsyncError() return `error` from now on, for every communicator of this thread.
void report(ncclResult_t error);

// Communicators of this process that were created and neither destroyed nor aborted.
[[nodiscard]] int living_communicators();

// The most channels of a communicator that was made since the last call.
[[nodiscard]] int most_channels_since_last_call();

}  // namespace normscope::nccl_on_host
