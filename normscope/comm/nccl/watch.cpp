// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/nccl/watch.h"

#include <utility>

#include "normscope/comm/nccl/cuda_calls.h"

namespace normscope::nccl {
namespace {

// Between two looks: short against any time limit, and next to nothing for a core.
constexpr std::chrono::milliseconds kInterval{20};

}  // namespace

Watch::Watch(int device, std::function<void(bool)> look)
    : device_(device),
      look_(std::move(look)),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

Watch::~Watch() {
  thread_.request_stop();
  thread_.join();
  // Errors are no business of a communicator that is going.
  for (const Work& work : under_way_) cudaEventDestroy(work.end);
  for (const cudaEvent_t event : unused_) cudaEventDestroy(event);
}

void Watch::add(cudaStream_t stream, Clock::time_point deadline) {
  const std::lock_guard lock(mutex_);
  const cudaEvent_t end = unused_event();
  under_way_.push_back({end, deadline});
  check_cuda(cudaEventRecord(end, stream), "cudaEventRecord");
  changed_.notify_one();
}

cudaEvent_t Watch::unused_event() {
  cudaEvent_t event = nullptr;
  if (unused_.empty()) {
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  } else {
    event = unused_.back();
    unused_.pop_back();
  }
  return event;
}

void Watch::run(const std::stop_token& stop) {
  cudaSetDevice(device_);
  // In CUDA's default mode a query of an event, or the end of an aborted communicator, would
  // invalidate what another thread captures. Nothing here is on a stream that anyone captures.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  std::unique_lock lock(mutex_);
  while (changed_.wait(lock, stop, [&] { return !under_way_.empty(); })) {
    forget_what_has_ended();
    if (under_way_.empty()) continue;
    const bool is_overdue = Clock::now() > under_way_.front().deadline;
    lock.unlock();
    look_(is_overdue);
    lock.lock();
    changed_.wait_for(lock, stop, kInterval, [] { return false; });
  }
}

// A stream ends its work in order; streams among themselves may not, which costs one look more.
void Watch::forget_what_has_ended() {
  while (!under_way_.empty() && cudaEventQuery(under_way_.front().end) != cudaErrorNotReady) {
    unused_.push_back(under_way_.front().end);
    under_way_.pop_front();
  }
}

}  // namespace normscope::nccl
