// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/peer_memory.h"
#include "normscope/kernels/cuda/last_block.cuh"

namespace normscope::cuda {

// How the last blocks of a kernel that sums exchange their sums with those of other ranks:
// send_to_peers() for each channel, meet_peers(), which all threads of the block call, and then
// sum_over_peers() for each number of a channel and count_exchange().

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

// The numbers of rank `from` for a channel are peers.capacity apart.
__device__ inline double* slot_of(const PeerMemory& peers, int owner, int from, std::int64_t c,
                                  std::uint64_t epoch) {
  const auto turn = static_cast<std::int64_t>(epoch % PeerMemory::kSlots);
  return peers.of_ranks[owner] + (turn * peers.ranks + from) * peers.slot_size() + c;
}

// The last exchange for which rank `from` has written its numbers of the channel.
__device__ inline std::uint64_t* announced(const PeerMemory& peers, int owner, int from,
                                           std::int64_t c) {
  return peers.words(owner) + from * peers.capacity + c;
}

// The number of the exchange of this channel. Counted on the device: a graph repeats the arguments.
__device__ inline std::uint64_t epoch_of(const PeerMemory& peers, std::int64_t c) {
  return *announced(peers, peers.rank, peers.rank, c) + 1;
}

// ---- The steps ----------------------------------------------------------------------------------

// Writes what numbers(k) returns for each k below kNumbers into the memory of all ranks.
template <class Numbers>
__device__ void send_to_peers(const PeerMemory& peers, std::int64_t c, const Numbers& numbers) {
  const std::uint64_t epoch = epoch_of(peers, c);
  for (int to = 0; to < peers.ranks; ++to) {
    double* const slot = slot_of(peers, to, peers.rank, c, epoch);
    NORMSCOPE_UNROLL
    for (int k = 0; k < PeerMemory::kNumbers; ++k) slot[k * peers.capacity] = numbers(k);
  }
}

// Whether rank `from` has sent the channel in another call than this one. Such a rank may have
// fewer channels.
__device__ inline bool makes_another_call(const PeerMemory& peers, const Header& header, int from,
                                          std::int64_t c) {
  const std::uint64_t epoch = epoch_of(peers, c);
  if (look_at(announced(peers, peers.rank, from, c)) < epoch) return false;
  const double* const numbers = slot_of(peers, peers.rank, from, c, epoch);
  return numbers[(PeerMemory::kHeader + kCallHash) * peers.capacity] != header.fields[kCallHash];
}

// Waits until the rank has announced its numbers of the channel. Returns false if there is a
// failure instead, or if the block's `first` channel has come with another call. After a failure it
// looks again, because a rank that has come may fail after that. A word of the host is far away: a
// wait looks at it now and then.
__device__ inline bool wait_for_peer(const PeerMemory& peers, const Header& header, int from,
                                     std::int64_t c, std::int64_t first) {
  constexpr int kLooksBetween = 64;
  const std::uint64_t epoch = epoch_of(peers, c);
  std::uint64_t* const word = announced(peers, peers.rank, from, c);
  const std::int64_t end = nanoseconds() + peers.time_limit;
  bool has_failed = false;
  bool is_late = false;
  while (true) {
    for (int i = 0; i < kLooksBetween; ++i) {
      if (look_at(word) >= epoch) return true;
    }
    if (has_failed) return false;
    if (is_late) {
      announce(peers.failure, static_cast<std::uint64_t>(1 + from));
      return false;
    }
    has_failed = look_at(peers.failure) != PeerMemory::kNone ||
                 makes_another_call(peers, header, from, first);
    is_late = nanoseconds() > end;
  }
}

// Announces this block's channels [begin, end) to all other ranks, and waits for theirs: for each
// channel and rank another thread, because what one thread announces or looks at takes its time one
// after the other. Returns whether all have come, to all threads.
__device__ inline bool meet_peers(const PeerMemory& peers, const Header& header, std::int64_t begin,
                                  std::int64_t end) {
  const std::int64_t channels = end - begin;
  const std::int64_t pairs = (peers.ranks - 1) * channels;
  const auto threads = static_cast<int>(blockDim.x * blockDim.y);
  const auto other = [&](std::int64_t pair) {
    const auto rank = static_cast<int>(pair / channels);
    return rank < peers.rank ? rank : rank + 1;
  };
  __syncthreads();
  for (std::int64_t i = thread_of_block(); i < pairs; i += threads) {
    const int to = other(i);
    const std::int64_t c = begin + i % channels;
    const std::uint64_t epoch = epoch_of(peers, c);
    announce(announced(peers, to, peers.rank, c), epoch);
  }
  __syncthreads();  // none waits before all have announced
  bool have_come = true;
  for (std::int64_t i = thread_of_block(); i < pairs; i += threads) {
    const std::int64_t c = begin + i % channels;
    have_come = wait_for_peer(peers, header, other(i), c, begin) && have_come;
  }
  return !__syncthreads_or(!have_come);
}

// Whether all ranks have announced their numbers of the channel. Rarely needed.
__device__ inline bool has_come_from_all(const PeerMemory& peers, std::int64_t c) {
  const std::uint64_t epoch = epoch_of(peers, c);
  for (int from = 0; from < peers.ranks; ++from) {
    if (from == peers.rank) continue;
    if (look_at(announced(peers, peers.rank, from, c)) < epoch) return false;
  }
  return true;
}

// Adds up number k of all ranks, in the order of the ranks.
__device__ inline double sum_over_peers(const PeerMemory& peers, std::int64_t c, int k) {
  const std::uint64_t epoch = epoch_of(peers, c);
  double total = 0.0;
  for (int from = 0; from < peers.ranks; ++from) {
    total += slot_of(peers, peers.rank, from, c, epoch)[k * peers.capacity];
  }
  return total;
}

// Ends the exchange of the channel.
__device__ inline void count_exchange(const PeerMemory& peers, std::int64_t c) {
  const std::uint64_t epoch = epoch_of(peers, c);
  *announced(peers, peers.rank, peers.rank, c) = epoch;
}

}  // namespace normscope::cuda
