// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>

namespace normscope {

// One piece of a parallel loop.
using Task = std::function<void(std::int64_t)>;

// Calls task(0) ... task(tasks - 1), possibly concurrently, and returns when all are done. Rethrows
// the first exception of a task.
using ParallelFor = std::function<void(std::int64_t tasks, const Task& task)>;

inline void run_serially(std::int64_t tasks, const Task& task) {
  for (std::int64_t i = 0; i < tasks; ++i) task(i);
}

// Where work runs. The caller provides the threads: this library keeps no pool. Results do not
// depend on any of these fields.
struct Execution {
  int threads = 1;  // at least 1
  ParallelFor parallel_for = run_serially;
};

}  // namespace normscope
