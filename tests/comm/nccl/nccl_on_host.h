// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

#include <cuda_runtime.h>
#include <nccl.h>

#include "tests/support/ranks.h"

// What the communicator over NCCL calls of NCCL and of CUDA, on the host: a stream is a thread that
// does its work in order, a device's memory is the host's, a rank is a thread. Sums are made and
// errors come about as the documentation of both says; nothing is said about speed.
namespace normscope::nccl_on_host {

// A stream of its own, which ends with this object.
class Stream {
 public:
  Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream();

  [[nodiscard]] cudaStream_t get() const noexcept { return stream_; }

  // Work that ends when the gate opens.
  void wait_at(testing::Gate& gate);

  // What is put on the stream from now on is recorded by a graph, and does not run. The mode is
  // CUDA's default, global: no thread may make calls that are unsafe meanwhile, unless it has
  // chosen the relaxed mode for itself.
  void capture();

  // Whether no such call was made so far.
  [[nodiscard]] bool capture_is_valid() const;

 private:
  cudaStream_t stream_ = nullptr;
};

// Returns once events have been queried that often, counted from this call.
void wait_for_event_queries(int count);

// What ncclCommGetAsyncError() says from now on, for every communicator of this thread.
void report(ncclResult_t error);

// From now on each ncclAllReduce() of this thread is in progress for that many looks at it, and for
// that long.
void take_time(int looks, std::chrono::microseconds duration);

// How often this thread has looked at what NCCL does meanwhile.
[[nodiscard]] int looks();

// Communicators of this process that were made and not destroyed, nor aborted.
[[nodiscard]] int living_communicators();

}  // namespace normscope::nccl_on_host
