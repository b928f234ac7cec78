// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include <cuda_runtime.h>

namespace normscope::nccl {

// Monitors work on a device that nobody waits for, in a thread of its own.
class Watch {
 public:
  using Clock = std::chrono::steady_clock;

  // Calls `look` at intervals while work is running; `is_overdue` if some has passed its deadline.
  explicit Watch(int device, std::function<void(bool is_overdue)> look);
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  ~Watch();

  // Monitors the work that is now on the stream; it should end by `deadline`. Throws
  // CommunicationError.
  void add(cudaStream_t stream, Clock::time_point deadline);

 private:
  struct Work {
    cudaEvent_t end;
    Clock::time_point deadline;
  };

  void run(const std::stop_token& stop);
  void forget_what_has_ended();
  cudaEvent_t unused_event();

  int device_;
  std::function<void(bool)> look_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable_any changed_;
  std::deque<Work> under_way_;
  std::vector<cudaEvent_t> unused_;
  std::jthread thread_;  // last: destroyed before the members that it uses
};

}  // namespace normscope::nccl
