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

template <class Row>
struct RowsAtOnce {
  Row row[kRowsAtOnce];
};

// The rows n, n + step, ... below `end`; beyond, zeros.
template <int kWidth, class AnyTerms>
NORMSCOPE_INLINE auto rows_at_once(const AnyTerms& terms, std::int64_t c, std::int64_t n,
                                   std::int64_t end, std::int64_t step) {
  RowsAtOnce<typename AnyTerms::template Row<kWidth>> rows = {};
  NORMSCOPE_UNROLL
  for (int i = 0; i < kRowsAtOnce; ++i, n += step) {
    if (n < end) rows.row[i] = terms.run(n, c, 0).template load<kWidth>(0);
  }
  return rows;
}

// Adds rows from n on until there is one with elements for which few limbs are not enough. In most
// tensors there is none. The loop has no more than this, because it decides how fast a kernel is.
template <int kWidth, class AnyTerms>
__device__ void add_few(const AnyTerms& terms, std::int64_t c, std::int64_t& n, std::int64_t end,
                        std::int64_t step, const float (&means)[kWidth],
                        ThreadLimbs (&own)[kWidth]) {
  typename AnyTerms::Few few[kWidth];
  const std::int64_t begin = n;
  const std::int64_t stop = smaller(end, n + kTilesBetweenCarries * step);
  for (; n < stop; n += kRowsAtOnce * step) {
    const auto rows = rows_at_once<kWidth>(terms, c, n, end, step);
    Magnitudes magnitudes;
    for (const auto& row : rows.row) {
      for (int j = 0; j < kWidth; ++j) {
        AnyTerms::Few::template collect<kWidth>(magnitudes, row, j, means[j]);
      }
    }
    if (!AnyTerms::Few::holds(magnitudes)) break;
    for (const auto& row : rows.row) {
      for (int j = 0; j < kWidth; ++j) few[j].template add<kWidth>(row, j, means[j]);
    }
  }
  if (n == begin) return;
  for (int j = 0; j < kWidth; ++j) few[j].add_to(own[j]);
}

// threadIdx.x selects channels, threadIdx.y a row. gridDim.y blocks share the rows, gridDim.z
// blocks the slices.
// Limits: 56 to 128 registers; bytes: 0 stack, 0 spilled, 20496 shared.
template <Access kAccess, class AnyTerms, class After>
__global__ void __launch_bounds__(kBlockThreads)
    add_elements(AnyTerms terms, NormBatches batches, DeviceScratch scratch, After after) {
  using Real = Arithmetic<typename AnyTerms::ElementType>;
  constexpr int kWidth = kElementWidth<kAccess>;
  __shared__ LimbExchange<kWidth> exchange;
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
      const std::int64_t begin = batches.first_sample(slice);
      const std::int64_t end = begin + batches.samples_of(slice);
      std::int64_t n = begin + std::int64_t{blockIdx.y} * blockDim.y + threadIdx.y;
      while (n < end) {
        if constexpr (sizeof(Real) < sizeof(double)) {
          add_few(terms, c, n, end, step, means, own);
          if (n >= end) break;
        }
        const auto rows = rows_at_once<kWidth>(terms, c, n, end, step);
        for (int i = 0; i < kRowsAtOnce && n < end; ++i, n += step) {
          for (int j = 0; j < kWidth; ++j) {
            AnyTerms::template add_element<kWidth>(own[j], rows.row[i], j, means[j]);
          }
        }
      }
    }
    const auto channel_of = [&](int thread, int j) { return first_channel + thread * kWidth + j; };
    add_of_block<0>(exchange, own, scratch.limbs(slice), channel_of);
    add_of_block<1>(exchange, own, scratch.limbs(slice), channel_of);
  }
  finish_channels(scratch, batches, first_channel, first_channel + kWarp * kWidth, after);
}

}  // namespace normscope::cuda
