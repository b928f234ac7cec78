// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

#include "normscope/core/execution.h"

namespace normscope::testing {

// Runs every task of a parallel loop in its own thread, however many there are.
[[nodiscard]] inline Execution on_threads(int threads) {
  const auto parallel_for = [](std::int64_t tasks, const Task& task) {
    std::vector<std::thread> running;
    for (std::int64_t i = 0; i < tasks; ++i) running.emplace_back([&task, i] { task(i); });
    for (std::thread& thread : running) thread.join();
  };
  return {.threads = threads, .parallel_for = parallel_for};
}

}  // namespace normscope::testing
