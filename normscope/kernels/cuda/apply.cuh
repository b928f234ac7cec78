// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "normscope/core/formulas.h"
#include "normscope/kernels/cuda/packs.cuh"
#include "normscope/kernels/device_kernels.h"

namespace normscope::cuda {

// How elements are computed, with coefficients that were rounded once per channel. output() gets
// an element of each input; kIsLong if its code is too long to be there for each of kAtOnce packs.

// Loop: at most 60 instructions per store; at least 4 loads.
template <class Element>
struct NormalizeElements {
  using ElementType = Element;
  using Real = Arithmetic<Element>;
  using Formula = Normalize<Real>;
  static constexpr int kCount = Coefficients::kNormalize;
  static constexpr int kInputs = 1;
  static constexpr int kAtOnce = 4;
  static constexpr bool kIsLong = false;

  Elements<const Element> inputs[kInputs];  // x
  const Real* coefficients;                 // [slices, kCount, C]

  NORMSCOPE_INLINE Real output(const Formula& formula, const Real (&in)[kInputs]) const {
    return formula(in[0]);
  }
};

// Loop: at most 80 instructions per store; at least 4 loads.
template <class Element>
struct InputGradientElements {
  using ElementType = Element;
  using Real = Arithmetic<Element>;
  using Formula = InputGradient<Real>;
  static constexpr int kCount = Coefficients::kInputGradient;
  static constexpr int kInputs = 2;
  static constexpr int kAtOnce = 4;
  static constexpr bool kIsLong = false;

  Elements<const Element> inputs[kInputs];  // x, dy
  const Real* coefficients;                 // [slices, kCount, C]

  NORMSCOPE_INLINE Real output(const Formula& formula, const Real (&in)[kInputs]) const {
    return formula(in[0], in[1]);
  }
};

// The coefficients of kPack channels, starting at c.
template <int kPack, class Apply>
struct LoadedFormulas {
  Pack<typename Apply::Real, kPack> values[Apply::kCount > 0 ? Apply::kCount : 1] = {};

  NORMSCOPE_INLINE LoadedFormulas(const Apply& apply, std::int64_t slice, std::int64_t c) {
    const std::int64_t channels = apply.inputs[0].channels;
    const auto* at = apply.coefficients + slice * Apply::kCount * channels + c;
    for (int k = 0; k < Apply::kCount; ++k) values[k] = load_pack<kPack>(at + k * channels);
  }

  // The formula of element j of a pack. Its members are the coefficients, in their order.
  NORMSCOPE_INLINE typename Apply::Formula operator[](int j) const {
    return formula(kPack == 1 ? 0 : j, std::make_index_sequence<Apply::kCount>{});
  }

 private:
  template <std::size_t... kIndices>
  NORMSCOPE_INLINE typename Apply::Formula formula([[maybe_unused]] int j,
                                                   std::index_sequence<kIndices...>) const {
    return {values[kIndices].elements[j]...};
  }
};

// A thread's way through all tensors of a formula. It leads backwards: the kernel that sums has
// walked forwards, and has left the end in L2.
template <class Apply>
class Walk {
 public:
  using Element = typename Apply::ElementType;
  using Real = typename Apply::Real;

  // Visits the packs first, first - step, ... down to 0, of those that start at (n, c, 0) and are
  // stride_of(tensor) elements apart. None if `first` is negative.
  template <class StrideOf>
  __device__ Walk(const Apply& apply, const Elements<Element>& y, std::int64_t n, std::int64_t c,
                  std::int64_t first, std::int64_t step, const StrideOf& stride_of)
      : apply_(apply), next_(first), step_(step) {
    y_.start(y.at(n, c, 0) + first * stride_of(y), -step * stride_of(y));
    NORMSCOPE_UNROLL
    for (int k = 0; k < Apply::kInputs; ++k) {
      const auto& input = apply.inputs[k];
      inputs_[k].start(input.at(n, c, 0) + first * stride_of(input), -step * stride_of(input));
    }
  }

  // Writes them, several at once as long as there are so many.
  template <int kPack, class Formulas>
  __device__ void write(bool streams, const Formulas& formulas) {
    constexpr int kAtOnce = Apply::kAtOnce;
    const std::int64_t last = in_register((kAtOnce - 1) * step_);
    const std::int64_t steps = in_register(kAtOnce * step_);
    if (streams) {
      for (; next_ >= last; next_ -= steps) write_packs<kPack, kAtOnce, Store::kStreamed>(formulas);
    } else {
      for (; next_ >= last; next_ -= steps) write_packs<kPack, kAtOnce, Store::kKept>(formulas);
    }
    write_one_by_one<kPack>(formulas);
  }
  template <int kPack, class Formulas>
  __device__ void write_one_by_one(const Formulas& formulas) {
    for (; next_ >= 0; next_ -= step_) write_packs<kPack, 1, Store::kKept>(formulas);
  }

 private:
  // A place in one tensor. Distances are in bytes and in registers: a loop then needs one addition
  // to reach the next pack.
  template <class Pointed>
  struct Place {
    char* at;
    std::int64_t one_pack;
    std::int64_t two_packs;
    std::int64_t at_once;

    __device__ void start(Pointed* first, std::int64_t elements) {
      const std::int64_t bytes = elements * std::int64_t{sizeof(Element)};
      at = reinterpret_cast<char*>(const_cast<Element*>(first));
      one_pack = in_register(bytes);
      two_packs = in_register(2 * bytes);
      at_once = in_register(Apply::kAtOnce * bytes);
    }
    // The i-th from here, for i below 4.
    NORMSCOPE_INLINE Pointed* pack(int i) const {
      return reinterpret_cast<Pointed*>(at + (i >= 2 ? two_packs : 0) +
                                        (i % 2 == 1 ? one_pack : 0));
    }
    NORMSCOPE_INLINE void skip(int packs) { at += packs == 1 ? one_pack : at_once; }
  };

  // Loads all inputs of kAtOnce packs before it stores the first. The compiler must keep this
  // order, since a store could change what is loaded after it.
  template <int kPack, int kAtOnce, Store kStore, class Formulas>
  __device__ void write_packs(const Formulas& formulas) {
    Pack<Element, kPack> loaded[kAtOnce][Apply::kInputs];
    NORMSCOPE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      for (int k = 0; k < Apply::kInputs; ++k) loaded[i][k] = load_pack<kPack>(inputs_[k].pack(i));
    }
    NORMSCOPE_UNROLL
    for (auto& input : inputs_) input.skip(kAtOnce);
    if constexpr (Apply::kIsLong) {
      // A loop, so that the code is there once. Packs move up instead of being counted: packs with
      // an index that varies would be in memory.
      NORMSCOPE_DO_NOT_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        write_pack<kStore>(y_.pack(0), loaded[0], formulas);
        y_.skip(1);
        for (int next = 1; next < kAtOnce; ++next) {
          for (int k = 0; k < Apply::kInputs; ++k) loaded[next - 1][k] = loaded[next][k];
        }
      }
    } else {
      NORMSCOPE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) write_pack<kStore>(y_.pack(i), loaded[i], formulas);
      y_.skip(kAtOnce);
    }
  }

  template <Store kStore, int kPack, class Formulas>
  __device__ void write_pack(Element* to, const Pack<Element, kPack> (&loaded)[Apply::kInputs],
                             const Formulas& formulas) {
    Real wide[Apply::kInputs][kPack];
    for (int k = 0; k < Apply::kInputs; ++k) widen_pack(loaded[k], wide[k]);
    Real outputs[kPack];
    NORMSCOPE_UNROLL
    for (int j = 0; j < kPack; ++j) {
      Real in[Apply::kInputs];
      for (int k = 0; k < Apply::kInputs; ++k) in[k] = wide[k][j];
      outputs[j] = apply_.output(formulas[j], in);
    }
    store_pack<kStore>(to, narrow_pack<Element>(outputs));
  }

  const Apply& apply_;
  std::int64_t next_;  // pack
  std::int64_t step_;
  Place<Element> y_;
  Place<const Element> inputs_[Apply::kInputs];
};

// How many blocks of a kernel a multiprocessor must have registers for. With fewer registers the
// compiler moves loads behind the first use of others, and keeps values in memory.
template <class Apply>
inline constexpr int kBlocksOf = Apply::kInputs > 1 || Apply::kIsLong ||
                                         sizeof(typename Apply::Real) == sizeof(double)
                                     ? 2
                                     : 3;

// The last of `packs` packs that a lane visits, if gridDim.y warps share them, a warp's neighbours
// together; negative if there is none.
__device__ inline std::int64_t last_of_lane(std::int64_t packs) {
  const std::int64_t of_warp = (packs + kWarp - 1) / kWarp - 1 - std::int64_t{blockIdx.y};
  const std::int64_t pack = of_warp * kWarp + threadIdx.x % kWarp;
  return pack < packs ? pack : pack - std::int64_t{gridDim.y} * kWarp;
}

// One warp per plane, the last one first. gridDim.y warps share a plane's positions, gridDim.z
// blocks the slices.
// Limits: 24 to 128 registers; bytes: 0 stack, 0 spilled, 0 shared; no float64.
template <Access kAccess, class Apply>
__global__ void __launch_bounds__(kBlockThreads, kBlocksOf<Apply>)
    apply_channels_first(Apply apply, NormBatches batches, Elements<typename Apply::ElementType> y,
                         bool streams) {
  constexpr int kPack = kPackSize<typename Apply::ElementType, kAccess>;
  wait_for_earlier_kernel();
  const std::int64_t planes = std::int64_t{gridDim.x} * (kBlockThreads / kWarp);
  const std::int64_t plane =
      planes - 1 - (std::int64_t{blockIdx.x} * (kBlockThreads / kWarp) + threadIdx.x / kWarp);
  const std::int64_t c = plane % y.channels;
  const std::int64_t step = std::int64_t{gridDim.y} * kWarp;
  const std::int64_t packs = y.positions / kPack;
  for (std::int64_t i = blockIdx.z; i < batches.slices; i += gridDim.z) {
    const std::int64_t slice = batches.slices - 1 - i;
    if (plane >= batches.samples_of(slice) * y.channels) continue;
    const std::int64_t n = batches.first_sample(slice) + plane / y.channels;
    const LoadedFormulas<1, Apply> formula(apply, slice, c);
    const auto size_of_pack = [&](const auto& /*tensor*/) { return kPack; };
    Walk<Apply> walk(apply, y, n, c, last_of_lane(packs), step, size_of_pack);
    walk.template write<kPack>(streams, formula);
    if constexpr (kPack > 1) {
      const auto one = [](const auto& /*tensor*/) { return 1; };
      const std::int64_t own = packs * kPack + threadIdx.x % kWarp;
      const bool is_owner = blockIdx.y == 0 && own < y.positions;
      Walk<Apply> rest(apply, y, n, c, is_owner ? own : -1, own + 1, one);
      rest.template write_one_by_one<1>(formula);
    }
  }
}

// threadIdx.x selects a pack of channels. threadIdx.y and gridDim.y share the rows of a run, of
// equal distance in each tensor: those of a slice if they are `joined`, otherwise those of a
// sample. gridDim.z blocks share the runs, the last one first.
// Limits: 24 to 128 registers; bytes: 0 stack, 0 spilled, 0 shared; no float64.
template <Access kAccess, class Apply>
__global__ void __launch_bounds__(kBlockThreads, kBlocksOf<Apply>)
    apply_channels_last(Apply apply, NormBatches batches, Elements<typename Apply::ElementType> y,
                        bool joined, bool streams) {
  constexpr int kPack = kPackSize<typename Apply::ElementType, kAccess>;
  wait_for_earlier_kernel();
  const std::int64_t c = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kPack;
  if (c >= y.channels) return;
  const std::int64_t from_last = std::int64_t{blockIdx.y} * blockDim.y + threadIdx.y;
  const std::int64_t step = std::int64_t{gridDim.y} * blockDim.y;
  const std::int64_t runs = joined ? batches.slices : batches.samples;
  for (std::int64_t i = blockIdx.z; i < runs; i += gridDim.z) {
    const std::int64_t run = runs - 1 - i;
    const std::int64_t slice = joined ? run : run / batches.slice_size;
    const std::int64_t n = joined ? batches.first_sample(run) : run;
    const std::int64_t rows = joined ? batches.samples_of(run) * y.positions : y.positions;
    const LoadedFormulas<kPack, Apply> formulas(apply, slice, c);
    const auto row = [](const auto& tensor) { return tensor.row_stride(); };
    Walk<Apply> walk(apply, y, n, c, rows - 1 - from_last, step, row);
    walk.template write<kPack>(streams, formulas);
  }
}

}  // namespace normscope::cuda
