// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/kernels/cuda/packs.cuh"
#include "normscope/kernels/device_kernels.h"

namespace normscope::cuda {

NORMSCOPE_INLINE int thread_of_block() {
  return static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
}

// Whether this block is the last of `blocks` to get here. All threads of the block must call it,
// and all get the answer. The last block sees everything that the other blocks have done before.
// The ticket ends as zero.
__device__ inline bool is_last_block(unsigned* ticket, unsigned blocks) {
  __shared__ bool is_last;
  __syncthreads();
  if (thread_of_block() == 0) {
    __threadfence();
    is_last = atomicInc(ticket, blocks - 1) == blocks - 1;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

// Ends a kernel that has added sums to the scratch memory. The last block of a column calls
// after.channel(scratch, c) for its channels [begin, end), and one thread of the last block of all
// calls after.once(). This saves a launch, about 2 us.
template <class After>
__device__ void finish_channels(const DeviceScratch& scratch, const NormBatches& batches,
                                std::int64_t begin, std::int64_t end, const After& after) {
  unsigned* tickets = scratch.tickets(batches.slices);
  if (!is_last_block(tickets + 1 + blockIdx.x, gridDim.y * gridDim.z)) return;
  const std::int64_t threads = std::int64_t{blockDim.x} * blockDim.y;
  for (std::int64_t c = begin + thread_of_block(); c < end && c < scratch.channels; c += threads) {
    after.channel(scratch, c);
  }
  if (is_last_block(tickets, gridDim.x) && thread_of_block() == 0) after.once();
}

}  // namespace normscope::cuda
