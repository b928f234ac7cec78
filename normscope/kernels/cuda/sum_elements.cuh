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

// The limbs of one sum for each row of a block's threads, to be added up.
template <int kWidth>
struct RowExchange {
  double limbs[kElementRows][kLimbs][kWarp * kWidth];
};

// Adds the limbs of one sum over all threads of a block. This leaves one atomic operation per limb
// and channel instead of kElementRows.
template <int kSum, int kWidth>
__device__ void add_rows(RowExchange<kWidth>& exchange, ThreadLimbs (&own)[kWidth],
                         const LimbsView& limbs, std::int64_t first_channel) {
  for (int j = 0; j < kWidth; ++j) {
    const double (&values)[kLimbs] = own[j].canonical(kSum);
    for (int k = 0; k < kLimbs; ++k) {
      exchange.limbs[threadIdx.y][k][threadIdx.x * kWidth + j] = values[k];
    }
  }
  __syncthreads();
  for (int i = thread_of_block(); i < kLimbs * kWarp * kWidth; i += kBlockThreads) {
    const int k = i / (kWarp * kWidth);
    const int channel = i % (kWarp * kWidth);
    double total = 0.0;
    for (int row = 0; row < kElementRows; ++row) total += exchange.limbs[row][k][channel];
    if (first_channel + channel < limbs.channels) {
      add_limb(limbs, kSum, k, first_channel + channel, total);
    }
  }
  __syncthreads();
}

// threadIdx.x selects channels, threadIdx.y a row. gridDim.y blocks share the rows, gridDim.z
// blocks the slices.
// Limits: 56 to 128 registers; bytes: 0 stack, 0 spilled, 20496 shared.
template <Access kAccess, class AnyTerms, class After>
__global__ void __launch_bounds__(kBlockThreads)
    add_elements(AnyTerms terms, NormBatches batches, DeviceScratch scratch, After after) {
  using Real = Arithmetic<typename AnyTerms::ElementType>;
  constexpr int kWidth = kElementWidth<kAccess>;
  __shared__ RowExchange<kWidth> exchange;
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
      const auto add = [&](const auto& row) {
        for (int j = 0; j < kWidth; ++j) {
          AnyTerms::template add_element<kWidth>(own[j], row, j, means[j]);
        }
      };
      for (; n + (kRowsAtOnce - 1) * step < end; n += kRowsAtOnce * step) {
        typename AnyTerms::template Row<kWidth> rows[kRowsAtOnce];
        for (int i = 0; i < kRowsAtOnce; ++i) {
          rows[i] = terms.template load_row<kWidth>(n + i * step, c);
        }
        for (int i = 0; i < kRowsAtOnce; ++i) add(rows[i]);
      }
      for (; n < end; n += step) add(terms.template load_row<kWidth>(n, c));
    }
    add_rows<0>(exchange, own, scratch.limbs(slice), first_channel);
    add_rows<1>(exchange, own, scratch.limbs(slice), first_channel);
  }
  finish_channels(scratch, batches, first_channel, first_channel + kWarp * kWidth, after);
}

}  // namespace normscope::cuda
