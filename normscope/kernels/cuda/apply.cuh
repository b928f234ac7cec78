// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/core/formulas.h"
#include "normscope/kernels/channel_values.h"
#include "normscope/kernels/cuda/sum_channels_first.cuh"

namespace normscope::cuda {

// What an element becomes, and the coefficients of its channel: computed in float64, rounded once.

template <class Element>
struct NormalizeElements {
  using ElementType = Element;
  using Real = Arithmetic<Element>;

  Elements<const Element> x;
  Statistics statistics;
  ChannelView weight;
  ChannelView bias;

  NORMSCOPE_INLINE Normalize<Real> formula(std::int64_t c) const {
    return {static_cast<Real>(statistics.mean_hi[c]), static_cast<Real>(statistics.mean_lo[c]),
            static_cast<Real>(channel_value(weight, c, 1.0) * statistics.inv_std[c]),
            static_cast<Real>(channel_value(bias, c, 0.0))};
  }

  template <int kPack>
  struct Inputs {
    Pack<Element, kPack> x;

    NORMSCOPE_INLINE Element apply(const Normalize<Real>& formula, int j) const {
      return narrow<Element>(formula(widen(x.elements[j])));
    }
  };
  template <int kPack>
  NORMSCOPE_INLINE Inputs<kPack> load(std::int64_t n, std::int64_t c, std::int64_t p) const {
    return {load_pack<kPack>(x.at(n, c, p))};
  }
};

template <class Element>
struct InputGradientElements {
  using ElementType = Element;
  using Real = Arithmetic<Element>;

  Elements<const Element> x;
  Elements<const Element> dy;
  Statistics statistics;
  ChannelView weight;
  GradientSums sums;
  Count count;

  NORMSCOPE_INLINE InputGradient<Real> formula(std::int64_t c) const {
    const double inv_std = statistics.inv_std[c];
    const double elements = count.value();
    return {static_cast<Real>(statistics.mean_hi[c]), static_cast<Real>(statistics.mean_lo[c]),
            static_cast<Real>(channel_value(weight, c, 1.0) * inv_std),
            static_cast<Real>(sums.dy[c] / elements),
            static_cast<Real>(inv_std * (sums.dy_xhat[c] / elements))};
  }

  template <int kPack>
  struct Inputs {
    Pack<Element, kPack> x;
    Pack<Element, kPack> dy;

    NORMSCOPE_INLINE Element apply(const InputGradient<Real>& formula, int j) const {
      return narrow<Element>(formula(widen(x.elements[j]), widen(dy.elements[j])));
    }
  };
  template <int kPack>
  NORMSCOPE_INLINE Inputs<kPack> load(std::int64_t n, std::int64_t c, std::int64_t p) const {
    return {load_pack<kPack>(x.at(n, c, p)), load_pack<kPack>(dy.at(n, c, p))};
  }
};

// A warp a plane; gridDim.y warps share a plane's positions.
// Limits: 24 to 80 registers; bytes: 16 stack, 48 spilled, 0 shared.
template <Access kAccess, class Apply>
__global__ void __launch_bounds__(kBlockThreads)
    apply_channels_first(Apply apply, Elements<typename Apply::ElementType> y) {
  constexpr int kPack = kPackSize<typename Apply::ElementType, kAccess>;
  const std::int64_t plane =
      std::int64_t{blockIdx.x} * (kBlockThreads / kWarp) + threadIdx.x / kWarp;
  if (plane >= y.samples * y.channels) return;
  const std::int64_t n = plane / y.channels;
  const std::int64_t c = plane % y.channels;
  const auto formula = apply.formula(c);
  const std::int64_t first = std::int64_t{blockIdx.y} * kWarp + threadIdx.x % kWarp;
  const std::int64_t step = std::int64_t{gridDim.y} * kWarp;
  const std::int64_t packs = y.positions / kPack;
  for (std::int64_t i = first; i < packs; i += step) {
    const auto inputs = apply.template load<kPack>(n, c, i * kPack);
    Pack<typename Apply::ElementType, kPack> outputs;
    for (int j = 0; j < kPack; ++j) outputs.elements[j] = inputs.apply(formula, j);
    store_pack(y.at(n, c, i * kPack), outputs);
  }
  for (std::int64_t p = packs * kPack + first; p < y.positions; p += step) {
    *y.at(n, c, p) = apply.template load<1>(n, c, p).apply(formula, 0);
  }
}

// Threads are packs of channels in x; in y they share the rows, which are samples and positions.
// Limits: 24 to 128 registers; bytes: 8 stack, 24 spilled, 0 shared.
template <Access kAccess, class Apply>
__global__ void __launch_bounds__(kBlockThreads)
    apply_channels_last(Apply apply, Elements<typename Apply::ElementType> y) {
  using Element = typename Apply::ElementType;
  constexpr int kPack = kPackSize<Element, kAccess>;
  const std::int64_t c = (std::int64_t{blockIdx.x} * kWarp + threadIdx.x) * kPack;
  if (c >= y.channels) return;
  decltype(apply.formula(0)) formulas[kPack];
  for (int j = 0; j < kPack; ++j) formulas[j] = apply.formula(c + j);
  const std::int64_t rows = y.samples * y.positions;
  const std::int64_t step = std::int64_t{gridDim.y} * blockDim.y;
  for (std::int64_t row = std::int64_t{blockIdx.y} * blockDim.y + threadIdx.y; row < rows;
       row += step) {
    const std::int64_t n = row / y.positions;
    const std::int64_t p = row % y.positions;
    const auto inputs = apply.template load<kPack>(n, c, p);
    Pack<Element, kPack> outputs;
    for (int j = 0; j < kPack; ++j) outputs.elements[j] = inputs.apply(formulas[j], j);
    store_pack(y.at(n, c, p), outputs);
  }
}

}  // namespace normscope::cuda
