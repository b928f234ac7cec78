// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>

#include "tests/comm/on_device/sum_over_ranks.h"

namespace normscope::cuda {

using testing::SharedSlots;

// ---- Words that kernels and the host see while kernels run --------------------------------------

// Whoever looks at the word and finds the value sees what this thread has done before, and what the
// threads of its block had done before they met it at a barrier.
__device__ inline void announce(std::uint64_t* word, std::uint64_t value) {
#if defined(__CUDACC__)
  asm volatile("st.release.sys.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
#else
  std::atomic_ref(*word).store(value, std::memory_order_release);
#endif
}

__device__ inline std::uint64_t look_at(std::uint64_t* word) {
#if defined(__CUDACC__)
  std::uint64_t value = 0;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
#else
  return std::atomic_ref(*word).load(std::memory_order_acquire);
#endif
}

__device__ inline std::int64_t nanoseconds() {
#if defined(__CUDACC__)
  std::int64_t now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#else
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
#endif
}

__device__ inline void pause() {
#if defined(__CUDACC__)
  __nanosleep(100);
#else
  std::this_thread::yield();
#endif
}

// ---- The kernel ---------------------------------------------------------------------------------

__device__ inline double* slot_of(const SharedSlots& shared, std::uint64_t epoch, int rank) {
  const auto index = static_cast<std::int64_t>(epoch % SharedSlots::kSlots) * shared.ranks + rank;
  return shared.slots + index * (1 + shared.capacity);
}

// Waits until all ranks have announced the epoch. Returns false if there is a failure instead.
__device__ inline bool wait_for_ranks(const SharedSlots& shared, std::uint64_t epoch) {
  const std::int64_t end = nanoseconds() + shared.time_limit;
  for (int rank = 0; rank < shared.ranks; ++rank) {
    while (true) {
      // Before the announcement: a rank that has come may leave, which fails the group.
      const bool has_failed = look_at(shared.failure) != 0;
      if (look_at(shared.announced + rank) >= epoch) break;
      if (has_failed) return false;
      if (nanoseconds() > end) {
        announce(shared.failure, static_cast<std::uint64_t>(1 + rank));
        return false;
      }
      pause();
    }
  }
  return true;
}

// Whether the slots of all ranks have as many numbers.
__device__ inline bool sizes_agree(const SharedSlots& shared, std::uint64_t epoch, double size) {
  for (int rank = 0; rank < shared.ranks; ++rank) {
    if (*slot_of(shared, epoch, rank) != size) return false;
  }
  return true;
}

// One block, so that the kernels of all ranks fit on the device at the same time.
__global__ void sum_over_ranks(SharedSlots shared, int rank, double* values, std::int64_t size) {
  // Counted on the device: a graph repeats the arguments.
  const std::uint64_t epoch = shared.announced[rank] + 1;
  double* const own = slot_of(shared, epoch, rank);
  if (threadIdx.x == 0) *own = static_cast<double>(size);
  for (std::int64_t i = threadIdx.x; i < size; i += blockDim.x) own[1 + i] = values[i];
  __syncthreads();

  __shared__ bool is_complete;
  if (threadIdx.x == 0) {
    announce(shared.announced + rank, epoch);
    is_complete =
        wait_for_ranks(shared, epoch) && sizes_agree(shared, epoch, static_cast<double>(size));
  }
  __syncthreads();

  for (std::int64_t i = threadIdx.x; i < size; i += blockDim.x) {
    if (!is_complete) {
      values[i] = std::numeric_limits<double>::quiet_NaN();
      continue;
    }
    double sum = slot_of(shared, epoch, 0)[1 + i];
    for (int r = 1; r < shared.ranks; ++r) sum += slot_of(shared, epoch, r)[1 + i];
    values[i] = sum;
  }
}

}  // namespace normscope::cuda
