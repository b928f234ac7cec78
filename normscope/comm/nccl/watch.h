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

// Looks after work on a device that nobody waits for, in a thread of its own.
class Watch {
 public:
  using Clock = std::chrono::steady_clock;

  // Calls `look` every now and then while work is under way, with whether some of it is overdue.
  explicit Watch(int device, std::function<void(bool is_overdue)> look);
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  ~Watch();

  // What the stream holds at present has to end by `deadline`. Throws CommunicationError.
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
  std::mutex mutex_;  // of what follows
  std::condition_variable_any changed_;
  std::deque<Work> under_way_;
  std::vector<cudaEvent_t> unused_;
  std::jthread thread_;  // last, so that it ends before the rest does
};

}  // namespace normscope::nccl
