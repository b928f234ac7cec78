// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <utility>

#include "normscope/core/formulas.h"
#include "normscope/kernels/cuda/packs.cuh"
#include "normscope/kernels/device_kernels.h"

namespace normscope::cuda {

// Makes a pack of the elements value(j).
template <class Element, int kPack, class Value>
NORMSCOPE_INLINE Pack<Element, kPack> pack_of(const Value& value) {
  Pack<Element, kPack> pack;
#if defined(__CUDACC__)
#pragma unroll  // otherwise sm_100 keeps packs in memory if there is an activation
#endif
  for (int j = 0; j < kPack; ++j) pack.elements[j] = value(j);
  return pack;
}

// How elements are computed, with coefficients that were rounded once per channel.

template <class Element>
struct NormalizeElements {
  using ElementType = Element;
  using Real = Arithmetic<Element>;
  using Formula = Normalize<Real>;
  static constexpr int kCount = Coefficients::kNormalize;

  Elements<const Element> x;
  const Real* coefficients;  // [slices, kCount, C]

  template <int kPack>
  struct Inputs {
    Pack<Element, kPack> x;

    template <class FormulaOf>
    NORMSCOPE_INLINE Pack<Element, kPack> apply(const FormulaOf& formula_of) const {
      return pack_of<Element, kPack>(
          [&](int j) { return narrow<Element>(formula_of(j)(widen(x.elements[j]))); });
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
  using Formula = InputGradient<Real>;
  static constexpr int kCount = Coefficients::kInputGradient;

  Elements<const Element> x;
  Elements<const Element> dy;
  const Real* coefficients;  // [slices, kCount, C]

  template <int kPack>
  struct Inputs {
    Pack<Element, kPack> x;
    Pack<Element, kPack> dy;

    template <class FormulaOf>
    NORMSCOPE_INLINE Pack<Element, kPack> apply(const FormulaOf& formula_of) const {
      return pack_of<Element, kPack>([&](int j) {
        return narrow<Element>(formula_of(j)(widen(x.elements[j]), widen(dy.elements[j])));
      });
    }
  };
  template <int kPack>
  NORMSCOPE_INLINE Inputs<kPack> load(std::int64_t n, std::int64_t c, std::int64_t p) const {
    return {load_pack<kPack>(x.at(n, c, p)), load_pack<kPack>(dy.at(n, c, p))};
  }
};

// The coefficients of kPack channels, starting at c.
template <int kPack, class Apply>
struct LoadedFormulas {
  Pack<typename Apply::Real, kPack> values[Apply::kCount > 0 ? Apply::kCount : 1];

  NORMSCOPE_INLINE LoadedFormulas(const Apply& apply, std::int64_t slice, std::int64_t c) {
    const std::int64_t channels = apply.x.channels;
    const auto* at = apply.coefficients + slice * Apply::kCount * channels + c;
    for (int k = 0; k < Apply::kCount; ++k) values[k] = load_pack<kPack>(at + k * channels);
  }

  // The formula of channel c + j. Its members are the coefficients, in their order.
  NORMSCOPE_INLINE typename Apply::Formula operator[](int j) const {
    return formula(j, std::make_index_sequence<Apply::kCount>{});
  }

 private:
  template <std::size_t... kIndices>
  NORMSCOPE_INLINE typename Apply::Formula formula([[maybe_unused]] int j,
                                                   std::index_sequence<kIndices...>) const {
    return {values[kIndices].elements[j]...};
  }
};

// One warp per plane. gridDim.y warps share a plane's positions, gridDim.z blocks the slices.
// Limits: 24 to 112 registers; bytes: 0 stack, 0 spilled, 0 shared; no float64.
template <Access kAccess, class Apply>
__global__ void __launch_bounds__(kBlockThreads)
    apply_channels_first(Apply apply, NormBatches batches,
                         Elements<typename Apply::ElementType> y) {
  constexpr int kPack = kPackSize<typename Apply::ElementType, kAccess>;
  wait_for_earlier_kernel();
  const std::int64_t plane =
      std::int64_t{blockIdx.x} * (kBlockThreads / kWarp) + threadIdx.x / kWarp;
  const std::int64_t c = plane % y.channels;
  const std::int64_t first = std::int64_t{blockIdx.y} * kWarp + threadIdx.x % kWarp;
  const std::int64_t step = std::int64_t{gridDim.y} * kWarp;
  const std::int64_t packs = y.positions / kPack;
  for (std::int64_t slice = blockIdx.z; slice < batches.slices; slice += gridDim.z) {
    if (plane >= batches.samples_of(slice) * y.channels) continue;
    const std::int64_t n = batches.first_sample(slice) + plane / y.channels;
    const auto formula = LoadedFormulas<1, Apply>(apply, slice, c)[0];
    for (std::int64_t i = first; i < packs; i += step) {
      const auto inputs = apply.template load<kPack>(n, c, i * kPack);
      store_pack(y.at(n, c, i * kPack), inputs.apply([&](int /*j*/) { return formula; }));
    }
    for (std::int64_t p = packs * kPack + first; p < y.positions; p += step) {
      const auto inputs = apply.template load<1>(n, c, p);
      store_pack(y.at(n, c, p), inputs.apply([&](int /*j*/) { return formula; }));
    }
  }
}

// threadIdx.x selects a pack of channels. threadIdx.y and gridDim.y share the rows, which are
// samples and positions; gridDim.z blocks share the slices.
// Limits: 24 to 128 registers; bytes: 0 stack, 0 spilled, 0 shared; no float64.
template <Access kAccess, class Apply>
__global__ void __launch_bounds__(kBlockThreads)
    apply_channels_last(Apply apply, NormBatches batches, Elements<typename Apply::ElementType> y) {
  using Element = typename Apply::ElementType;
  constexpr int kPack = kPackSize<Element, kAccess>;
  wait_for_earlier_kernel();
  const std::int64_t c = (std::int64_t{blockIdx.x} * kWarp + threadIdx.x) * kPack;
  if (c >= y.channels) return;
  const std::int64_t step = std::int64_t{gridDim.y} * blockDim.y;
  for (std::int64_t slice = blockIdx.z; slice < batches.slices; slice += gridDim.z) {
    const LoadedFormulas<kPack, Apply> formulas(apply, slice, c);
    const std::int64_t rows = batches.samples_of(slice) * y.positions;
    for (std::int64_t row = std::int64_t{blockIdx.y} * blockDim.y + threadIdx.y; row < rows;
         row += step) {
      const std::int64_t n = batches.first_sample(slice) + row / y.positions;
      const std::int64_t p = row % y.positions;
      const auto inputs = apply.template load<kPack>(n, c, p);
      store_pack(y.at(n, c, p), inputs.apply([&](int j) { return formulas[j]; }));
    }
  }
}

}  // namespace normscope::cuda
