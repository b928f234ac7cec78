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
//
// The coefficients are written by the previous kernel of the same call, which starts after all
// others have ended (Order::kAfter). So the inputs of formulas with coefficients are complete when
// an apply kernel starts, even if it starts before that kernel has ended, and whoever wrote them:
// the program, or a kernel of the call, as for dz. A formula without coefficients begins its call,
// and waits for the inputs too.

// Loop: at most 60 instructions per store; at least 4 loads; at least 4 before the wait.
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

// Loop: at most 80 instructions per store, 81 with AfterSumsOfPlanes, 81 with AfterSumsOfRows; at
// least 8 loads; at least 8 before the wait.
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

// A thread's way through all tensors of a formula, kAtOnce packs at a time. It leads backwards: the
// kernel that sums has walked forwards, and has left the end in L2.
template <class Apply, int kPack, int kAtOnce = Apply::kAtOnce>
class Walk {
 public:
  using Element = typename Apply::ElementType;
  using Real = typename Apply::Real;

  // Visits the packs first, first - step, ... down to 0, of those that start `begin` elements
  // after (n, c, p) and are stride_of(tensor) elements apart. None if `first` is negative.
  template <class StrideOf>
  __device__ Walk(const Apply& apply, const Elements<Element>& y, std::int64_t n, std::int64_t c,
                  std::int64_t p, std::int64_t begin, std::int64_t first, std::int64_t step,
                  const StrideOf& stride_of)
      : apply_(apply), next_(first), step_(step) {
    y_.start(y.at(n, c, p) + begin + first * stride_of(y), -step * stride_of(y));
    NORMSCOPE_UNROLL
    for (int k = 0; k < Apply::kInputs; ++k) {
      const auto& input = apply.inputs[k];
      inputs_[k].start(input.at(n, c, p) + begin + first * stride_of(input),
                       -step * stride_of(input));
    }
  }

  // Loads the first packs. Must be called before write().
  __device__ void start() {
    if (next_ >= 0) load_what_is_left();
  }

  // Writes all packs.
  template <class Formulas>
  __device__ void write(bool streams, const Formulas& formulas) {
    if (streams) {
      write_turns<Store::kStreamed>(formulas);
    } else {
      write_turns<Store::kKept>(formulas);
    }
    write_loaded(formulas);
  }

  // The same if there are at most kAtOnce.
  template <class Formulas>
  __device__ void write_loaded(const Formulas& formulas) {
    write_down_to<Store::kKept>(0, formulas);
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
      at_once = in_register(kAtOnce * bytes);
    }
    // The i-th from here, for i below 4.
    NORMSCOPE_INLINE Pointed* pack(int i) const {
      return reinterpret_cast<Pointed*>(at + (i >= 2 ? two_packs : 0) +
                                        (i % 2 == 1 ? one_pack : 0));
    }
    NORMSCOPE_INLINE void skip(int packs) { at += packs == 1 ? one_pack : at_once; }
  };

  // The bits of a pack. The compiler would carry its elements from loop to loop one by one.
  using Bits =
      std::conditional_t<(kPack * sizeof(Element) < sizeof(std::uint32_t)), Pack<std::uint16_t, 1>,
                         Pack<std::uint32_t, kPack * sizeof(Element) / 4>>;

  static NORMSCOPE_INLINE Bits load(const Element* from) {
    return std::bit_cast<Bits>(load_pack<kPack>(from));
  }

  // Loads kAtOnce packs of all inputs.
  __device__ void load_turn() {
    NORMSCOPE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      for (int k = 0; k < Apply::kInputs; ++k) {
        loaded_[i][k] = load(inputs_[k].pack(i));
      }
    }
    skip_loaded();
  }

  // The same if there may be fewer. The next one then takes the places of those that there are not,
  // because loads that wait for a condition are not in flight together.
  __device__ void load_what_is_left() {
    NORMSCOPE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const bool exists = next_ >= i * step_;
      for (int k = 0; k < Apply::kInputs; ++k) {
        loaded_[i][k] = load(exists ? inputs_[k].pack(i) : inputs_[k].pack(0));
      }
    }
    skip_loaded();
  }

  __device__ void skip_loaded() {
    NORMSCOPE_UNROLL
    for (auto& input : inputs_) input.skip(kAtOnce);
  }

  // Writes kAtOnce packs as long as there are so many, and loads those that are left. All loads of
  // a turn come before the first store. The compiler must keep this order, since a store could
  // change what is loaded after it.
  template <Store kStore, class Formulas>
  __device__ void write_turns(const Formulas& formulas) {
    const std::int64_t last = in_register((kAtOnce - 1) * step_);
    const std::int64_t steps = in_register(kAtOnce * step_);
    if (next_ < last) return;
    while (true) {
      write_turn<kStore>(last, steps, formulas);
      if (next_ < last) break;
      load_turn();
    }
    if (next_ >= 0) load_what_is_left();
  }

  template <Store kStore, class Formulas>
  __device__ void write_turn(std::int64_t last, std::int64_t steps, const Formulas& formulas) {
    if constexpr (Apply::kIsLong) {
      write_down_to<kStore>(next_ - last, formulas);
    } else {
      NORMSCOPE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) write_pack<kStore>(y_.pack(i), loaded_[i], formulas);
      y_.skip(kAtOnce);
      next_ -= steps;
    }
  }

  // Writes the loaded packs down to `last` in a loop, so that the code is there once. Packs move up
  // instead of being counted: packs with an index that varies would be in memory.
  template <Store kStore, class Formulas>
  __device__ void write_down_to(std::int64_t last, const Formulas& formulas) {
    NORMSCOPE_DO_NOT_UNROLL
    for (; next_ >= last; next_ -= step_) {
      write_pack<kStore>(y_.pack(0), loaded_[0], formulas);
      y_.skip(1);
      NORMSCOPE_UNROLL
      for (int i = 1; i < kAtOnce; ++i) {
        for (int k = 0; k < Apply::kInputs; ++k) loaded_[i - 1][k] = loaded_[i][k];
      }
    }
  }

  template <Store kStore, class Formulas>
  __device__ void write_pack(Element* to, const Bits (&loaded)[Apply::kInputs],
                             const Formulas& formulas) {
    Real wide[Apply::kInputs][kPack];
    for (int k = 0; k < Apply::kInputs; ++k) {
      widen_pack(std::bit_cast<Pack<Element, kPack>>(loaded[k]), wide[k]);
    }
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
  std::int64_t next_;  // pack that is written next
  std::int64_t step_;
  Place<Element> y_;
  Place<const Element> inputs_[Apply::kInputs];  // of the pack that is loaded next
  Bits loaded_[kAtOnce][Apply::kInputs] = {};
};

// How many blocks of a kernel a multiprocessor must have registers for. With fewer registers the
// compiler moves loads behind the first use of others, and keeps values in memory.
template <class Apply>
inline constexpr int kBlocksOf = Apply::kInputs > 1 || Apply::kIsLong ||
                                         sizeof(typename Apply::Real) == sizeof(double)
                                     ? 2
                                     : 3;

// Which of the warps that share a plane this one is.
struct PartOfPlane {
  std::int64_t index;
  std::int64_t count;

  // The last of `packs` packs that a lane visits, a warp's neighbours together; negative if there
  // is none.
  __device__ std::int64_t last_of_lane(std::int64_t packs) const {
    const std::int64_t of_warp = (packs + kWarp - 1) / kWarp - 1 - index;
    const std::int64_t pack = of_warp * kWarp + threadIdx.x % kWarp;
    return pack < packs ? pack : pack - count * kWarp;
  }
};

// Writes a warp's part of `positions` elements of plane (n, c). kWaits: the earlier kernel writes
// the coefficients.
template <Access kAccess, bool kWaits, class Apply>
__device__ void apply_to_plane(const Apply& apply, const Elements<typename Apply::ElementType>& y,
                               std::int64_t slice, std::int64_t n, std::int64_t c,
                               std::int64_t positions, const PartOfPlane& part, bool streams) {
  constexpr int kPack = kPackSize<typename Apply::ElementType, kAccess>;
  const std::int64_t head = smaller(size_before_pack<kPack>(y.at(n, c, 0)), positions);
  const std::int64_t packs = (positions - head) / kPack;
  const auto size_of_pack = [&](const auto& /*tensor*/) { return kPack; };
  Walk<Apply, kPack> walk(apply, y, n, c, 0, head, part.last_of_lane(packs), part.count * kWarp,
                          size_of_pack);
  walk.start();
  // The elements before the first pack and after the last one. A warp has more lanes than that.
  const std::int64_t lane = threadIdx.x % kWarp;
  const std::int64_t own = lane < head ? lane : packs * kPack + lane;
  const bool is_owner = kPack > 1 && part.index == 0 && own < positions;
  const auto one = [](const auto& /*tensor*/) { return 1; };
  Walk<Apply, 1, 1> rest(apply, y, n, c, 0, own, is_owner ? 0 : -1, 1, one);
  rest.start();
  if (kWaits) wait_for_earlier_kernel();
  const LoadedFormulas<1, Apply> formula(apply, slice, c);
  rest.write_loaded(formula);
  walk.write(streams, formula);
}

// Whether what wrote the inputs may still run when the kernel starts.
template <class Apply>
inline constexpr bool kWaitsForInputs = Apply::kCount == 0;

// One warp per plane, the last one first. gridDim.y warps share a plane's positions, gridDim.z
// blocks the slices.
// Limits: 24 to 128 registers; bytes: 0 stack, 0 spilled, 0 shared; no float64.
template <Access kAccess, class Apply>
__global__ void __launch_bounds__(kBlockThreads, kBlocksOf<Apply>)
    apply_channels_first(Apply apply, NormBatches batches, Elements<typename Apply::ElementType> y,
                         bool streams) {
  if (kWaitsForInputs<Apply>) wait_for_earlier_kernel();
  const std::int64_t planes = std::int64_t{gridDim.x} * (kBlockThreads / kWarp);
  const std::int64_t plane =
      planes - 1 - (std::int64_t{blockIdx.x} * (kBlockThreads / kWarp) + threadIdx.x / kWarp);
  const std::int64_t c = plane % y.channels;
  for (std::int64_t i = blockIdx.z; i < batches.slices; i += gridDim.z) {
    const std::int64_t slice = batches.slices - 1 - i;
    const bool has_plane = plane < batches.samples_of(slice) * y.channels;
    const std::int64_t n = batches.first_sample(slice) + plane / y.channels;
    const std::int64_t positions = has_plane ? y.positions : 0;
    apply_to_plane<kAccess, true>(apply, y, slice, n, c, positions, {blockIdx.y, gridDim.y},
                                  streams);
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
  if (kWaitsForInputs<Apply>) wait_for_earlier_kernel();
  const std::int64_t channel = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kPack;
  const bool has_channels = channel < y.channels;
  const std::int64_t c = has_channels ? channel : 0;
  const std::int64_t from_last = std::int64_t{blockIdx.y} * blockDim.y + threadIdx.y;
  const std::int64_t step = std::int64_t{gridDim.y} * blockDim.y;
  const std::int64_t runs = joined ? batches.slices : batches.samples;
  for (std::int64_t i = blockIdx.z; i < runs; i += gridDim.z) {
    const std::int64_t run = runs - 1 - i;
    const std::int64_t slice = joined ? run : run / batches.slice_size;
    const std::int64_t n = joined ? batches.first_sample(run) : run;
    const std::int64_t samples = joined ? batches.samples_of(run) : 1;
    const std::int64_t rows = has_channels ? samples * y.positions : 0;
    const auto row = [](const auto& tensor) { return tensor.row_stride(); };
    Walk<Apply, kPack> walk(apply, y, n, c, 0, 0, rows - 1 - from_last, step, row);
    walk.start();
    wait_for_earlier_kernel();
    const LoadedFormulas<kPack, Apply> formulas(apply, slice, c);
    walk.write(streams, formulas);
  }
}

}  // namespace normscope::cuda
