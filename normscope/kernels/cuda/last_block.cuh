// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/kernels/cuda/packs.cuh"
#include "normscope/kernels/device_kernels.h"

namespace normscope::cuda {

NORMSCOPE_INLINE int thread_of_block() {
  return static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
}

// Takes a ticket: 0, 1, ... `last`, and 0 again. Whoever takes a later one sees what this block has
// done before. One instruction for it is faster than a relaxed one between two fences.
__device__ inline unsigned take_ticket(unsigned* ticket, unsigned last) {
#if defined(__CUDACC__)
  unsigned taken = 0;
  asm volatile("atom.acq_rel.gpu.inc.u32 %0, [%1], %2;"
               : "=r"(taken)
               : "l"(ticket), "r"(last)
               : "memory");
  return taken;
#else
  return cuda_on_host::ThisThread::take_ticket(ticket, last);
#endif
}

// Whether this block is the last of `blocks` to get here. All threads of the block must call it,
// and all get the answer. The last block sees everything that the other blocks have done before,
// for which a device empties the first-level cache of its multiprocessor. A block alone keeps what
// is there. The ticket ends as zero.
__device__ inline bool is_last_block(unsigned* ticket, unsigned blocks) {
  __shared__ bool is_last;
  __syncthreads();
  if (blocks == 1) return true;
  if (thread_of_block() == 0) is_last = take_ticket(ticket, blocks - 1) == blocks - 1;
  __syncthreads();
  return is_last;
}

// Calls after.once() in one thread of the grid, if one block of each column calls this. It is
// called after all channels only if it must be, because that takes another ticket.
template <class After>
__device__ void finish_once(unsigned* ticket, const After& after) {
  const bool is_here = after.once_is_last() ? is_last_block(ticket, gridDim.x) : blockIdx.x == 0;
  if (is_here && thread_of_block() == 0) after.once();
}

// How many places the blocks of a column add the sums of a slice at.
NORMSCOPE_INLINE int places_in_use(const DeviceScratch& scratch) {
  constexpr unsigned kMostBlocksAtOnePlace = 16;
  return gridDim.y > kMostBlocksAtOnePlace ? places_of_sums(scratch.slices) : 1;
}

// Where this block adds the sums of a slice.
NORMSCOPE_INLINE LimbsView limbs_of_block(const DeviceScratch& scratch, std::int64_t slice) {
  return scratch.limbs(slice, blockIdx.y % places_in_use(scratch));
}

// Ends a kernel that has added sums to the scratch memory. The last block of a column calls
// after.channel(scratch, places, c) for its channels [begin, end), and after.exchange() if they are
// exchanged inside of the kernel; one thread of the grid calls after.once(). Then
// after.write_outputs() is called, by all blocks if After::kHasClusters, otherwise by the last one.
// This saves a launch, about 2 us. Other
// multiprocessors have nothing to do meanwhile, and few warps cannot hide latencies: the number of
// instructions in a row is what matters here.
template <class After>
__device__ void finish_channels(const DeviceScratch& scratch, std::int64_t begin, std::int64_t end,
                                const After& after) {
  unsigned* tickets = scratch.tickets();
  const bool is_last = is_last_block(tickets + 1 + blockIdx.x, gridDim.y * gridDim.z);
  if (!is_last && !After::kHasClusters) return;
  end = smaller(end, scratch.channels);
  if (is_last || !After::kHasClusters) {
    const int places = places_in_use(scratch);
    const std::int64_t threads = std::int64_t{blockDim.x} * blockDim.y;
    for (std::int64_t c = begin + thread_of_block(); c < end; c += threads) {
      after.channel(scratch, places, c);
    }
    if (after.exchanges()) after.exchange(begin, end);
    finish_once(tickets, after);
  }
  after.write_outputs(begin, end);
}

}  // namespace normscope::cuda
