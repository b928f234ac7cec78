// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/kernels/cuda/apply.cuh"
#include "normscope/kernels/cuda/finalize.cuh"

namespace normscope::cuda {

// One kernel for all steps of a direction, if each block sums all elements of its channels: the
// block writes their outputs too, as soon as it has their coefficients. It reads the elements from
// its multiprocessor's cache, and no block waits for another one.

// The most bytes of inputs that such a block reads. Two blocks may share a multiprocessor, whose
// cache has 256 KB (H100) or 192 KB (A100).
inline constexpr std::int64_t kMostBytesOfBlock = 112 * 1024;

// After the sums of tiles that are channels first and in packs. There is one slice.
template <class User, class Apply>
struct AfterSumsOfPlanes : AfterSums<User> {
  Apply apply;
  Elements<typename Apply::ElementType> y;
  bool streams;

  [[nodiscard]] NORMSCOPE_INLINE bool lets_next_kernel_start() const { return false; }

  // Warps take planes in turn. If there are fewer planes than warps, several share each of them.
  __device__ void write_outputs(std::int64_t begin, std::int64_t end) const {
    __syncthreads();  // the coefficients are written
    const auto samples = static_cast<int>(y.samples);
    const int planes = static_cast<int>(end - begin) * samples;
    const int warps = static_cast<int>(blockDim.x) / kWarp;
    const int parts = planes < warps ? warps / planes : 1;
    for (int i = static_cast<int>(threadIdx.x) / kWarp; i < planes * parts; i += warps) {
      const int plane = planes - 1 - i / parts;
      const std::int64_t c = begin + plane / samples;
      apply_to_plane<Access::kPacks, false>(apply, y, 0, plane % samples, c, y.positions,
                                            {i % parts, parts}, streams);
    }
  }
};

}  // namespace normscope::cuda
