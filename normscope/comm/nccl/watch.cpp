// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/nccl/watch.h"

#include <utility>

#include "normscope/comm/nccl/cuda_calls.h"

namespace normscope::nccl {
namespace {

// Between two checks: short compared to any time limit, and negligible load for a core.
constexpr std::chrono::milliseconds kInterval{20};

}  // namespace

Watch::Watch(int device, std::function<void(bool)> look)
    : device_(device),
      look_(std::move(look)),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

Watch::~Watch() {
  thread_.request_stop();
  thread_.join();
  // Errors are ignored: the communicator is being destroyed.
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
  // In CUDA's default mode, querying an event or aborting a communicator would invalidate a capture
  // in another thread. The relaxed mode is safe here: this thread uses no stream that is captured.
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

// Work on one stream ends in order. Work on several may not: a later check then forgets it.
void Watch::forget_what_has_ended() {
  while (!under_way_.empty() && cudaEventQuery(under_way_.front().end) != cudaErrorNotReady) {
    unused_.push_back(under_way_.front().end);
    under_way_.pop_front();
  }
}

}  // namespace normscope::nccl
