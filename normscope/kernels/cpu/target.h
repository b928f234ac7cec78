// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "normscope/core/activation.h"
#include "normscope/core/element.h"
#include "normscope/core/formulas.h"
#include "normscope/core/limbs.h"
#include "normscope/core/tensor_view.h"
#include "normscope/kernels/kernels.h"

namespace normscope::cpu {

// A range of a tensor's tiles, ordered by sample and then by position. Each tile stands for all
// channels of the tensor.
struct TileRange {
  std::int64_t begin;
  std::int64_t end;
};

// The coefficients of a formula for many channels: an array [C] for each of the formula's members,
// in their order. Formula is Normalize, InputGradient or ActivatedInputGradient; Number is the type
// of the arithmetic, possibly const.
template <template <class> class Formula, class Number>
struct FormulaArrays {
  static constexpr int kCount = sizeof(Formula<std::remove_const_t<Number>>) / sizeof(Number);

  Number* arrays[kCount];

  // The first member of every formula.
  [[nodiscard]] NORMSCOPE_INLINE Number* mean_hi() const noexcept { return arrays[0]; }

  // The channels from c on, read-only.
  [[nodiscard]] NORMSCOPE_INLINE FormulaArrays<Formula, const Number> from(
      std::int64_t c) const noexcept {
    FormulaArrays<Formula, const Number> from;
    for (int k = 0; k < kCount; ++k) from.arrays[k] = arrays[k] + c;
    return from;
  }
};

// Whether an output is read again soon, or should bypass the cache.
enum class Stores { kCached, kStreaming };

// The work of one thread for one element type. Sums of at most kTilesBetweenCarries tiles are added
// to canonical limbs, which the caller must then canonicalize again. Each function does what the
// function of Kernels with its name does. Without an activation (kNone), add_gradient_sums reads
// mean_hi only.
//
// Kernels that write a tensor process its tiles in reverse order, because the sweep before has left
// the last ones in the cache. dz is read again at once, so its stores are cached.
template <class Element>
struct ElementKernels {
  using Real = Arithmetic<Element>;
  template <template <class> class Formula>
  using Formulas = FormulaArrays<Formula, const Real>;

  void (*add_moments)(const TensorView& x, TileRange tiles, LimbsView limbs);
  void (*add_gradient_sums)(const TensorView& x, const TensorView& dy,
                            const Formulas<Normalize>& formulas,
                            const ActivationFunction& activation, TileRange tiles, LimbsView limbs);
  void (*normalize)(const TensorView& x, const Formulas<Normalize>& formulas,
                    const ActivationFunction& activation, const TensorView& residual,
                    TileRange tiles, Stores stores, const MutableTensorView& y);
  void (*input_gradient)(const TensorView& x, const TensorView& dy,
                         const Formulas<ActivatedInputGradient>& formulas,
                         const ActivationFunction& activation, TileRange tiles, Stores stores,
                         const MutableTensorView& dx);
  void (*activation_gradient)(const TensorView& x, const TensorView& dy,
                              const Formulas<Normalize>& formulas,
                              const ActivationFunction& activation, TileRange tiles,
                              const MutableTensorView& dz);
  void (*gradient_of_output)(const TensorView& y, const TensorView& dy,
                             const ActivationFunction& activation, TileRange tiles,
                             const MutableTensorView& dz);
};

// The kernels of one instruction set, compiled once for each set. They are serial, and use nothing
// (containers, standard algorithms) whose code another translation unit might share.
struct Target {
  bool (*can_run)();

  const ElementKernels<float>* float32;
  const ElementKernels<double>* float64;
  const ElementKernels<BFloat16>* bfloat16;
  const ElementKernels<Float16>* float16;

  void (*add_limbs)(LimbsView from, LimbsView to);  // to += from
  void (*canonicalize)(LimbsView limbs);

  // Writes the mean as a pair and, in place of inv_std, the population variance. The limbs need not
  // be canonical.
  void (*moments)(LimbsView limbs, double count, MutableStatistics to);
  void (*gradient_sums)(LimbsView limbs, Statistics statistics, GradientSums sums);

  template <class Element>
  [[nodiscard]] constexpr const ElementKernels<Element>& of() const noexcept {
    if constexpr (sizeof(Element) == sizeof(double)) {
      return *float64;
    } else if constexpr (sizeof(Element) == sizeof(float)) {
      return *float32;
    } else if constexpr (requires(Element e, BFloat16 b) { e = b; }) {
      return *bfloat16;
    } else {
      return *float16;
    }
  }
};

namespace baseline {
extern const Target kTarget;  // runs on every machine of the architecture: SSE2 on x86-64
}
namespace avx2 {
extern const Target kTarget;
}
namespace avx512 {
extern const Target kTarget;
}

#if defined(NORMSCOPE_TARGET)
// The instruction set that is compiled for, such as avx2. Everything that is compiled for it is in
// a namespace of this name.
namespace NORMSCOPE_TARGET {
extern const ElementKernels<float> kFloat32;
extern const ElementKernels<double> kFloat64;
extern const ElementKernels<BFloat16> kBFloat16;
extern const ElementKernels<Float16> kFloat16;
}  // namespace NORMSCOPE_TARGET
#endif

}  // namespace normscope::cpu
