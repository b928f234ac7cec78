// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/element.h"
#include "normscope/core/tensor_view.h"

// Device code. Tests also compile it with the host's compiler, and supply what CUDA builds into the
// language (threadIdx, __syncthreads, atomicAdd, ...): docs/decisions/0014.

namespace normscope::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kWholeWarp = 0xFFFFFFFFU;
inline constexpr int kBlockThreads = 256;

// Waits until the previous kernels have ended. A kernel that is launched while the previous one
// still runs (Order::kEarly) must call this first, in every thread.
__device__ inline void wait_for_earlier_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#elif !defined(__CUDACC__)
  cuda_on_host::ThisThread::wait_for_earlier_kernel();
#endif
}

// The widest memory transaction of a thread is 16 bytes.
inline constexpr int kPackBytes = 16;

// How many elements a thread takes at a time: a full pack if every contiguous run starts at a
// multiple of 16 bytes, otherwise one.
enum class Access { kPacks, kElements };

template <class Element, Access kAccess>
inline constexpr int kPackSize =
    kAccess == Access::kPacks ? kPackBytes / static_cast<int>(sizeof(Element)) : 1;

template <class Element, int kSize>
struct alignas(sizeof(Element) * kSize) Pack {
  Element elements[kSize];
};

template <int kSize, class Element>
NORMSCOPE_INLINE Pack<Element, kSize> load_pack(const Element* from) {
  return *reinterpret_cast<const Pack<Element, kSize>*>(from);
}

template <int kSize, class Element>
NORMSCOPE_INLINE void store_pack(Element* to, const Pack<Element, kSize>& pack) {
  *reinterpret_cast<Pack<Element, kSize>*>(to) = pack;
}

// A typed tensor view for kernels.
template <class Element>
struct Elements {
  Element* data;
  std::int64_t samples;
  std::int64_t channels;
  std::int64_t positions;
  std::int64_t sample_stride;
  std::int64_t channel_stride;
  std::int64_t position_stride;

  NORMSCOPE_INLINE Element* at(std::int64_t n, std::int64_t c, std::int64_t p) const {
    return data + n * sample_stride + c * channel_stride + p * position_stride;
  }
};

}  // namespace normscope::cuda
