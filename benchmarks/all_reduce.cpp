// SPDX-License-Identifier: Apache-2.0
//
// Median time of an all-reduce between processes that share memory, as rank 0 sees it.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <vector>

#include <benchmark/benchmark.h>
#include <sys/wait.h>
#include <unistd.h>

#include "normscope/comm/shared_memory_communicator.h"
#include "normscope/comm/shared_memory_segment.h"
#include "normscope/core/error.h"

namespace {

using normscope::make_shared_memory_communicator;

// The body of another rank: takes part until rank 0 leaves.
[[noreturn]] void accompany(const normscope::SharedMemorySegment& segment, int rank,
                            std::vector<double> values) {
  const auto communicator = make_shared_memory_communicator(segment, rank);
  try {
    for (;;) communicator->all_reduce_sum(values);
  } catch (const normscope::CommunicationError&) {
    _exit(0);
  }
}

// Arguments: the number of ranks, and the size of the message in bytes.
void all_reduce(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0));
  std::vector<double> values(static_cast<std::size_t>(state.range(1)) / sizeof(double));
  const auto segment = normscope::SharedMemorySegment::create(ranks);
  for (int rank = 1; rank < ranks; ++rank) {
    if (fork() == 0) accompany(segment, rank, values);
  }

  std::vector<double> microseconds;
  auto communicator = make_shared_memory_communicator(segment, 0);
  communicator->all_reduce_sum(values);
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    communicator->all_reduce_sum(values);
    microseconds.push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
            .count());
  }
  communicator.reset();
  for (int rank = 1; rank < ranks; ++rank) wait(nullptr);

  const auto middle = microseconds.begin() + std::ssize(microseconds) / 2;
  std::nth_element(microseconds.begin(), middle, microseconds.end());
  state.counters["median_us"] = *middle;
}

}  // namespace

BENCHMARK(all_reduce)
    ->ArgNames({"ranks", "bytes"})
    ->ArgsProduct({{2, 4, 8}, {1 << 10, 1 << 12, 1 << 15}})
    ->Iterations(20'000)
    ->UseRealTime();
