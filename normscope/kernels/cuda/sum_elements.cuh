// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/kernels/cuda/tile_terms.cuh"

namespace normscope::cuda {

// Sums of inputs with one position per channel, in which each element is a tile.

// How many channels a thread takes together: as many as have their limbs in registers.
template <Access kAccess>
inline constexpr int kElementWidth = kAccess == Access::kPacks ? 2 : 1;

// How many rows a thread loads at once.
inline constexpr int kRowsAtOnce = 4;

inline constexpr int kElementRows = kBlockThreads / kWarp;  // per block

// A thread's way through the elements of some channels: the rows n, n + step, ... below `end`.
template <int kWidth, class AnyTerms>
struct ElementRows {
  using Real = Arithmetic<typename AnyTerms::ElementType>;
  template <int kRows>
  struct Loaded {
    typename AnyTerms::template Row<kWidth> rows[kRows];
  };

  const AnyTerms& terms;
  std::int64_t c;
  std::int64_t n;
  std::int64_t end;
  std::int64_t step;
  const Real (&means)[kWidth];

  template <int kRows>
  [[nodiscard]] NORMSCOPE_INLINE bool has() const {
    return n + (kRows - 1) * step < end;
  }

  template <int kRows>
  NORMSCOPE_INLINE Loaded<kRows> load() const {
    Loaded<kRows> loaded;
    NORMSCOPE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      loaded.rows[i] = terms.run(n + i * step, c, 0).template load<kWidth>(0);
    }
    return loaded;
  }

  // Adds elements to all limbs that they may need.
  template <int kRows>
  __device__ void add(ThreadLimbs (&own)[kWidth]) {
    const auto loaded = load<kRows>();
    NORMSCOPE_UNROLL
    for (const auto& row : loaded.rows) {
      for (int j = 0; j < kWidth; ++j) {
        AnyTerms::template add_element<kWidth>(own[j], row, j, means[j]);
      }
    }
    n += kRows * step;
  }

  // Adds rows up to the first ones with an element that few limbs do not hold. Most tensors have no
  // such element, and the kernel spends its time in this loop.
  template <int kRows, class Few>
  __device__ void add_while_few(Few (&few)[kWidth]) {
    for (; has<kRows>(); n += kRows * step) {
      const auto loaded = load<kRows>();
      Magnitudes magnitudes;
      for (const auto& row : loaded.rows) {
        for (int j = 0; j < kWidth; ++j) {
          Few::template collect<kWidth>(magnitudes, row, j, means[j]);
        }
      }
      if (!Few::holds(magnitudes)) return;
      for (const auto& row : loaded.rows) {
        for (int j = 0; j < kWidth; ++j) few[j].template add<kWidth>(row, j, means[j]);
      }
    }
  }

  __device__ void add_all(ThreadLimbs (&own)[kWidth]) {
    if constexpr (sizeof(Real) == sizeof(double)) {
      while (has<kRowsAtOnce>()) add<kRowsAtOnce>(own);
      while (has<1>()) add<1>(own);
    } else {
      typename AnyTerms::Few few[kWidth];
      while (has<1>()) {
        add_while_few<kRowsAtOnce>(few);
        add_while_few<1>(few);
        if (has<1>()) add<1>(own);
      }
      for (int j = 0; j < kWidth; ++j) few[j].add_to(own[j]);
    }
  }
};

// threadIdx.x selects channels, threadIdx.y a row. gridDim.y blocks share the rows, gridDim.z
// blocks the slices.
// Limits: 56 to 128 registers; bytes: 8 stack, 24 spilled, 20496 shared.
// Loop: at least 4 loads; at most 160 float64 instructions, for 8 elements.
template <Access kAccess, class AnyTerms, class After>
__global__ void __launch_bounds__(kBlockThreads, 2)
    add_elements(AnyTerms terms, NormBatches batches, DeviceScratch scratch, After after) {
  using Real = Arithmetic<typename AnyTerms::ElementType>;
  constexpr int kWidth = kElementWidth<kAccess>;
  __shared__ LimbExchange<kWidth, kBlockThreads> exchange;
  const std::int64_t first_channel = std::int64_t{blockIdx.x} * kWarp * kWidth;
  const std::int64_t c = first_channel + std::int64_t{threadIdx.x} * kWidth;
  const std::int64_t step = std::int64_t{gridDim.y} * blockDim.y;
  for (std::int64_t slice = blockIdx.z; slice < batches.slices; slice += gridDim.z) {
    ThreadLimbs own[kWidth];
    if (c < scratch.channels) {
      Real means[kWidth] = {};
      if constexpr (!AnyTerms::kHasPivot) {
        for (int j = 0; j < kWidth; ++j) means[j] = static_cast<Real>(terms.mean(slice, c + j));
      }
      // In parts, because few limbs have room for only so many elements.
      const std::int64_t begin = batches.first_sample(slice);
      const std::int64_t end = begin + batches.samples_of(slice);
      for (std::int64_t n = begin + std::int64_t{blockIdx.y} * blockDim.y + threadIdx.y; n < end;
           n += kTilesBetweenCarries * step) {
        ElementRows<kWidth, AnyTerms> rows{
            terms, c, n, smaller(end, n + kTilesBetweenCarries * step), step, means};
        rows.add_all(own);
      }
    }
    if (after.lets_next_kernel_start()) let_next_kernel_start();
    const auto channel_of = [&](int thread, int j) { return first_channel + thread * kWidth + j; };
    add_of_block(exchange, own, limbs_of_block(scratch, slice), channel_of);
  }
  finish_channels(scratch, first_channel, first_channel + kWarp * kWidth, after);
}

}  // namespace normscope::cuda
