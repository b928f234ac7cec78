// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>

#include "normscope/kernels/cuda/last_block.cuh"
#include "normscope/kernels/peer_memory.h"

namespace normscope::cuda {

// ---- Words that other devices and the host see while kernels run --------------------------------

// Whoever looks at the word and finds the value sees what this thread has done before, and what the
// threads of its block had done before a barrier that they have passed together.
__device__ inline void announce(std::uint64_t* word, std::uint64_t value) {
#if defined(__CUDACC__)
  asm volatile("st.release.sys.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
#else
  cuda_on_host::ThisThread::announce(word, value);
#endif
}

__device__ inline std::uint64_t look_at(std::uint64_t* word) {
#if defined(__CUDACC__)
  std::uint64_t value = 0;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
#else
  return cuda_on_host::ThisThread::look_at(word);
#endif
}

__device__ inline std::int64_t nanoseconds() {
#if defined(__CUDACC__)
  std::int64_t now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#else
  return cuda_on_host::ThisThread::nanoseconds();
#endif
}

// ---- Places in the memory of a rank, the owner --------------------------------------------------

// The slot of a message of rank `from`.
__device__ inline double* slot_of(const PeerMemory& peers, int owner, int from,
                                  std::uint64_t epoch) {
  const auto turn = static_cast<std::int64_t>(epoch % PeerMemory::kSlots);
  return peers.of_ranks[owner] + (turn * peers.ranks + from) * peers.slot_size();
}

// The last message of rank `from` whose part is complete in its slot.
__device__ inline std::uint64_t* announced(const PeerMemory& peers, int owner, int from, int part) {
  return peers.words(owner) + from * PeerMemory::kParts + part;
}

// ---- The kernel ---------------------------------------------------------------------------------

// Waits until the rank has announced its part of the message. Returns false if there is a failure
// instead. A word of the host is far away: a wait looks at it now and then, and each time before
// the announcement, because a rank that has come may fail after that.
__device__ inline bool wait_for_peer(const PeerMemory& peers, int from, std::uint64_t epoch) {
  constexpr int kLooksBetween = 64;
  std::uint64_t* const word = announced(peers, peers.rank, from, static_cast<int>(blockIdx.x));
  const std::int64_t end = nanoseconds() + peers.time_limit;
  while (true) {
    const bool has_failed = look_at(peers.failure) != PeerMemory::kNone;
    const bool is_late = nanoseconds() > end;
    for (int i = 0; i < kLooksBetween; ++i) {
      if (look_at(word) >= epoch) return true;
    }
    if (has_failed) return false;
    if (is_late) {
      announce(peers.failure, static_cast<std::uint64_t>(1 + from));
      return false;
    }
  }
}

// Each of kParts blocks sums its part of the values, whatever the other blocks do.
// Limits: 24 to 64 registers; bytes: 0 stack, 0 spilled, 64 shared.
__global__ void sum_over_peers(const __grid_constant__ PeerMemory peers, double* values,
                               std::int64_t size) {
  const int part = static_cast<int>(blockIdx.x);
  const auto thread = static_cast<int>(threadIdx.x);
  const std::int64_t length = (size + PeerMemory::kParts - 1) / PeerMemory::kParts;
  const std::int64_t begin = part * length;
  const std::int64_t end = begin + length < size ? begin + length : size;
  const auto size_here = static_cast<double>(size);
  // Counted on the device: a graph repeats the arguments.
  const std::uint64_t epoch = *announced(peers, peers.rank, peers.rank, part) + 1;

  for (int to = 0; to < peers.ranks; ++to) {
    double* const slot = slot_of(peers, to, peers.rank, epoch);
    if (thread == 0) slot[part] = size_here;
    for (std::int64_t i = begin + thread; i < end; i += blockDim.x) {
      slot[PeerMemory::kParts + i] = values[i];
    }
  }
  __syncthreads();
  if (thread < peers.ranks) announce(announced(peers, thread, peers.rank, part), epoch);
  __syncthreads();  // also between threads of a warp: none waits before all have announced

  // What is added to the sum because of a rank: 0 if all is well with it.
  __shared__ double flaws[PeerMemory::kMostRanks];
  if (thread < peers.ranks) {
    const bool has_come = wait_for_peer(peers, thread, epoch);
    const bool fits = has_come && slot_of(peers, peers.rank, thread, epoch)[part] == size_here;
    flaws[thread] = fits ? 0.0 : std::numeric_limits<double>::infinity();
    if (!has_come) flaws[thread] = std::numeric_limits<double>::quiet_NaN();
  }
  __syncthreads();
  double flaw = 0.0;
  for (int from = 0; from < peers.ranks; ++from) flaw += flaws[from];

  for (std::int64_t i = begin + thread; i < end; i += blockDim.x) {
    double sum = flaw;
    for (int from = 0; from < peers.ranks && flaw == 0.0; ++from) {
      sum += slot_of(peers, peers.rank, from, epoch)[PeerMemory::kParts + i];
    }
    values[i] = sum;
  }
}

}  // namespace normscope::cuda
