// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

// What nvcc builds into the language, for a compiler of the host: the unchanged source of the
// kernels then runs on the CPU. Include it before any .cuh.
//
// Each block is a thread of the operating system. Each thread of a block is a fiber in it, which
// runs until it waits at a barrier or for its warp. Blocks share nothing but global memory, whose
// atomic additions are atomic here too. Under ThreadSanitizer, fibers are threads that only
// barriers and warps order. It then reports a missing barrier or atomic as a race, in whatever
// order the fibers ran.

namespace normscope::cuda_on_host {

struct Index {
  unsigned x;
  unsigned y;
  unsigned z;
};

// Whether a kernel may start before those launched earlier have ended. Its threads must then wait
// for them.
enum class Start { kAfterOthers, kEarly };

// The calling thread's place in the grid, and its waits for other threads.
class ThisThread {
 public:
  static Index thread();
  static Index block();
  static Index block_size();
  static Index grid_size();

  static void wait_for_block();

  // Waits for all threads of the blocks of a cluster.
  static void meet_in_cluster();

  // Gives every thread of the warp 8 bytes from each of its threads, valid until the second next
  // exchange.
  static const std::uint64_t* exchange_in_warp(std::uint64_t own);
  static int lane();

  // Takes a ticket, and wraps to 0 after `last`. Orders what this thread did before, and what
  // others did before theirs.
  static unsigned take_ticket(unsigned* ticket, unsigned last);

  // Words that kernels of other devices see while they run.
  static void announce(std::uint64_t* word, std::uint64_t value);
  static std::uint64_t look_at(std::uint64_t* word);
  static std::int64_t nanoseconds();

  static void wait_for_earlier_kernel();
  static void let_next_kernel_start();

  // Count an access, and check it: a device traps if the address is no multiple of the bytes.
  static void load(const void* address, std::size_t bytes);
  static void store(const void* address, std::size_t bytes);
};

inline constexpr int kWarpThreads = 32;

// Runs body() as every thread of the grid, and returns when all have ended: whether all blocks have
// let the next kernel start. `cluster` blocks with the same index x are a cluster: 1, or grid.y.
// Threads of a block take turns in an order that differs between launches. Throws std::logic_error
// if threads wait for others that have ended or wait elsewhere, or if an early kernel does not wait
// for the one before, or for an access that is not aligned.
bool run_grid(Index grid, Index block, unsigned cluster, Start start,
              const std::function<void()>& body);

}  // namespace normscope::cuda_on_host

// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming): CUDA names these.

#define __global__
#define __device__
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (::normscope::cuda_on_host::ThisThread::thread())
#define blockIdx (::normscope::cuda_on_host::ThisThread::block())
#define blockDim (::normscope::cuda_on_host::ThisThread::block_size())
#define gridDim (::normscope::cuda_on_host::ThisThread::grid_size())

namespace normscope::cuda {

inline void __syncthreads() { cuda_on_host::ThisThread::wait_for_block(); }

template <class Value>
Value exchange(Value value, int source) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(Value));
  bits = cuda_on_host::ThisThread::exchange_in_warp(bits)[source];
  std::memcpy(&value, &bits, sizeof(Value));
  return value;
}

template <class Value>
Value __shfl_down_sync(unsigned /*mask*/, Value value, int distance, int width) {
  const int lane = cuda_on_host::ThisThread::lane();
  const bool is_within = lane % width + distance < width;
  return exchange(value, is_within ? lane + distance : lane);
}

template <class Value>
Value __shfl_xor_sync(unsigned /*mask*/, Value value, int distance) {
  return exchange(value, cuda_on_host::ThisThread::lane() ^ distance);
}

template <class Value>
Value __shfl_sync(unsigned /*mask*/, Value value, int source, int width) {
  const int lane = cuda_on_host::ThisThread::lane();
  return exchange(value, lane / width * width + source);
}

inline bool __any_sync(unsigned /*mask*/, bool here) {
  const std::uint64_t* all = cuda_on_host::ThisThread::exchange_in_warp(here ? 1 : 0);
  return std::any_of(all, all + cuda_on_host::kWarpThreads, [](std::uint64_t b) { return b != 0; });
}

inline bool __syncthreads_or(bool here) {
  // Of this block: the thread of the operating system runs no other meanwhile.
  static thread_local std::atomic<bool> any;
  __syncthreads();
  any.store(false, std::memory_order_relaxed);
  __syncthreads();
  if (here) any.store(true, std::memory_order_relaxed);
  __syncthreads();
  return any.load(std::memory_order_relaxed);
}

inline double __ldcg(const double* from) { return *from; }

inline void atomicAdd(double* to, double value) {
  std::atomic_ref<double>(*to).fetch_add(value, std::memory_order_relaxed);
}

}  // namespace normscope::cuda

// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
