// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <new>
#include <stop_token>
#include <thread>
#include <utility>

namespace normscope::binding {

// Starts a thread that calls turn() after each pause, until it returns false. A turn that there is
// no memory for is left out.
[[nodiscard]] inline std::jthread periodic_thread(std::chrono::milliseconds pause,
                                                  std::function<bool()> turn) {
  return std::jthread([pause, turn = std::move(turn)](const std::stop_token& stop) {
    std::mutex mutex;
    std::condition_variable_any wake;
    for (bool goes_on = true; goes_on;) {
      std::unique_lock lock(mutex);
      wake.wait_for(lock, stop, pause, [] { return false; });
      if (stop.stop_requested()) return;
      try {
        goes_on = turn();
      } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch)
        // The next turn tries again.
      }
    }
  });
}

}  // namespace normscope::binding
