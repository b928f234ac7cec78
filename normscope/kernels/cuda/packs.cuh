// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "normscope/core/element.h"
#include "normscope/core/tensor_view.h"

// Device code. Tests also compile it with the host's compiler, and supply what CUDA builds into the
// language (threadIdx, __syncthreads, atomicAdd, ...): docs/decisions/0014.

// Before a loop whose arrays must be in registers on a device: its compiler does not unroll long
// bodies, and arrays with an index that varies are in memory.
#if defined(__CUDACC__)
#define NORMSCOPE_UNROLL _Pragma("unroll")
#define NORMSCOPE_DO_NOT_UNROLL _Pragma("unroll 1")
#else
#define NORMSCOPE_UNROLL
#define NORMSCOPE_DO_NOT_UNROLL
#endif

namespace normscope::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kWholeWarp = 0xFFFFFFFFU;
inline constexpr int kBlockThreads = 256;

// The first virtual architecture, compute_90, that has instructions for the next two functions, and
// clusters.
#define NORMSCOPE_FIRST_ARCHITECTURE_THAT_WAITS 90
inline constexpr int kFirstArchitectureThatWaits = NORMSCOPE_FIRST_ARCHITECTURE_THAT_WAITS;

// Waits until the previous kernels have ended, if they have not: another call takes no time. A
// kernel that is launched while the previous one still runs (Order::kEarly) must call this in every
// thread, before it writes to memory or reads what may not have been there yet.
__device__ inline void wait_for_earlier_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 10 * NORMSCOPE_FIRST_ARCHITECTURE_THAT_WAITS
  asm volatile("griddepcontrol.wait;" ::: "memory");
#elif !defined(__CUDACC__)
  cuda_on_host::ThisThread::wait_for_earlier_kernel();
#endif
}

// The next kernel, if it is one of Order::kEarly, may start when all blocks have called this or
// ended. It waits for their results in any case. Kernels that sum call it after their last load of
// a tensor: the loads of the next kernel would share the memory's bandwidth with theirs. Kernels
// that wait for other ranks do not call it: the blocks of the next kernel would take the room of
// what those ranks wait for.
__device__ inline void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 10 * NORMSCOPE_FIRST_ARCHITECTURE_THAT_WAITS
  asm volatile("griddepcontrol.launch_dependents;");
#elif !defined(__CUDACC__)
  cuda_on_host::ThisThread::let_next_kernel_start();
#endif
}

// Waits for all threads of the blocks of a cluster, of which each then sees what the others have
// done before. Without clusters, each block is one of its own.
__device__ inline void meet_in_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 10 * NORMSCOPE_FIRST_ARCHITECTURE_THAT_WAITS
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
#elif defined(__CUDACC__)
  asm volatile("barrier.sync 0;" ::: "memory");
#else
  cuda_on_host::ThisThread::meet_in_cluster();
#endif
}

// A value that is in a register from here on. Without this, the compiler computes what a loop needs
// again in every turn.
__device__ inline std::int64_t in_register(std::int64_t value) {
#if defined(__CUDACC__)
  asm("" : "+l"(value));
#endif
  return value;
}

// The widest memory transaction of a thread is 16 bytes.
inline constexpr int kPackBytes = 16;

// How many elements a thread takes at a time: a pack, which starts at a multiple of 16 bytes, or
// one. Packs of channels fill their rows. Packs of a plane leave fewer elements than a pack at each
// of its ends, the same in all tensors.
enum class Access { kPacks, kElements };

template <class Element, Access kAccess>
inline constexpr int kPackSize =
    kAccess == Access::kPacks ? kPackBytes / static_cast<int>(sizeof(Element)) : 1;

template <class Element, int kSize>
struct alignas(sizeof(Element) * kSize) Pack {
  Element elements[kSize];
};

#if defined(__CUDACC__)
// The type of CUDA's functions that store so many bytes.
template <std::size_t kBytes>
struct WordOf;
template <>
struct WordOf<2> {
  using Type = short;
};
template <>
struct WordOf<4> {
  using Type = int;
};
template <>
struct WordOf<8> {
  using Type = int2;
};
template <>
struct WordOf<16> {
  using Type = int4;
};
#endif

template <int kSize, class Element>
NORMSCOPE_INLINE Pack<Element, kSize> load_pack(const Element* from) {
#if !defined(__CUDACC__)
  cuda_on_host::ThisThread::load(from, sizeof(Pack<Element, kSize>));
#endif
  return *reinterpret_cast<const Pack<Element, kSize>*>(from);
}

// The places from begin to end - 1, by their distance from another one.
struct Range {
  int begin;
  int end;

  // All or some of `count` places from `first` on.
  NORMSCOPE_INLINE bool contains(int first, int count = 1) const {
    return first >= begin && first + count <= end;
  }
  NORMSCOPE_INLINE bool touches(int first, int count) const {
    return first + count > begin && first < end;
  }
};

// The elements of the pack at `begin` that are in `wanted`, with anything else in place of the
// others. Elements outside of `readable` are not loaded.
template <int kSize, class Element>
NORMSCOPE_INLINE Pack<Element, kSize> load_part_of_pack(const Element* from, int begin,
                                                        const Range& wanted,
                                                        const Range& readable) {
  Pack<Element, kSize> pack = {};
  if (!wanted.touches(begin, kSize)) return pack;
  if (readable.contains(begin, kSize)) return load_pack<kSize>(from + begin);
  for (int j = 0; j < kSize; ++j) {
    if (wanted.contains(begin + j)) pack.elements[j] = load_pack<1>(from + begin + j).elements[0];
  }
  return pack;
}

// kStreamed: what is stored leaves L2 before anything else does.
enum class Store { kKept, kStreamed };

template <Store kStore, int kSize, class Element>
NORMSCOPE_INLINE void store_pack(Element* to, const Pack<Element, kSize>& pack) {
#if defined(__CUDA_ARCH__)
  if constexpr (kStore == Store::kStreamed) {
    using Word = typename WordOf<sizeof(pack)>::Type;
    __stcs(reinterpret_cast<Word*>(to), std::bit_cast<Word>(pack));
    return;
  }
#elif !defined(__CUDACC__)
  cuda_on_host::ThisThread::store(to, sizeof(pack));
#endif
  *reinterpret_cast<Pack<Element, kSize>*>(to) = pack;
}

// The elements of a pack as numbers.
template <class Element, int kSize>
NORMSCOPE_INLINE void widen_pack(const Pack<Element, kSize>& pack,
                                 Arithmetic<Element> (&values)[kSize]) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<Element, BFloat16> && kSize > 1) {
    // One instruction per element, because elements are not taken out of their words first.
    const auto words = std::bit_cast<Pack<std::uint32_t, kSize / 2>>(pack);
    for (int j = 0; j < kSize; ++j) {
      const std::uint32_t word = words.elements[j / 2];
      values[j] = std::bit_cast<float>(j % 2 == 0 ? word << 16U : word & 0xFFFF0000U);
    }
  } else
#endif
  {
    for (int j = 0; j < kSize; ++j) values[j] = widen(pack.elements[j]);
  }
}

// The elements nearest to numbers.
template <class Element, int kSize>
NORMSCOPE_INLINE Pack<Element, kSize> narrow_pack(const Arithmetic<Element> (&values)[kSize]) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Element) == 2 && kSize > 1) {
    Pack<std::uint32_t, kSize / 2> pairs;
    for (int j = 0; j < kSize / 2; ++j) {
      pairs.elements[j] = narrow_pair<Element>(values[2 * j], values[2 * j + 1]);
    }
    return std::bit_cast<Pack<Element, kSize>>(pairs);
  } else
#endif
  {
    Pack<Element, kSize> pack;
    for (int j = 0; j < kSize; ++j) pack.elements[j] = narrow<Element>(values[j]);
    return pack;
  }
}

NORMSCOPE_INLINE std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// How many elements there are from here to the next pack.
template <int kSize, class Element>
NORMSCOPE_INLINE int size_before_pack(const Element* from) {
  const std::uintptr_t place = reinterpret_cast<std::uintptr_t>(from) / sizeof(Element);
  return static_cast<int>(-place % kSize);
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

  // What may be read around (n, c, p), as far as `reach` elements: all of the tensor if its planes
  // follow each other without gaps, otherwise this plane.
  NORMSCOPE_INLINE Range around(std::int64_t n, std::int64_t c, std::int64_t p, int reach) const {
    const bool is_dense = channel_stride == positions && sample_stride == channels * positions;
    const std::int64_t before = is_dense ? (n * channels + c) * positions + p : p;
    const std::int64_t all = is_dense ? samples * channels * positions : positions;
    return {-static_cast<int>(smaller(before, reach)),
            static_cast<int>(smaller(all - before, reach))};
  }

  // Whether the rows of channels of all samples are row_stride() apart.
  [[nodiscard]] bool has_even_rows() const {
    return positions == 1 || samples <= 1 || sample_stride == positions * position_stride;
  }
  // 0 if there is only one row: strides of extents of one may be anything.
  NORMSCOPE_INLINE std::int64_t row_stride() const {
    if (positions > 1) return position_stride;
    return samples > 1 ? sample_stride : 0;
  }
};

}  // namespace normscope::cuda
