// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>

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

// Replaces any NaN by the one that arithmetic produces, which rounding to 16 bits relies on.
template <class Real>
[[nodiscard]] NORMSCOPE_INLINE Real with_plain_nan(Real value) noexcept {
  return value == value ? value : std::numeric_limits<Real>::quiet_NaN();
}

// The coefficients of Normalize or InputGradient for many channels, one array per coefficient.
// Number is the type of the arithmetic, possibly const.
template <class Number>
struct NormalizeArrays {
  Number* mean_hi;  // [C]
  Number* mean_lo;  // [C]
  Number* scale;    // [C]
  Number* bias;     // [C]

  NORMSCOPE_INLINE void set(std::int64_t c, const Normalize<Number>& formula) const noexcept {
    mean_hi[c] = with_plain_nan(formula.mean_hi);
    mean_lo[c] = with_plain_nan(formula.mean_lo);
    scale[c] = with_plain_nan(formula.scale);
    bias[c] = with_plain_nan(formula.bias);
  }
  // The channels from c on, read-only.
  [[nodiscard]] constexpr NormalizeArrays<const Number> from(std::int64_t c) const noexcept {
    return {mean_hi + c, mean_lo + c, scale + c, bias + c};
  }
};
template <class Number>
struct InputGradientArrays {
  Number* mean_hi;  // [C]
  Number* mean_lo;  // [C]
  Number* scale;    // [C]
  Number* mean_dy;  // [C]
  Number* slope;    // [C]

  NORMSCOPE_INLINE void set(std::int64_t c, const InputGradient<Number>& formula) const noexcept {
    mean_hi[c] = with_plain_nan(formula.mean_hi);
    mean_lo[c] = with_plain_nan(formula.mean_lo);
    scale[c] = with_plain_nan(formula.scale);
    mean_dy[c] = with_plain_nan(formula.mean_dy);
    slope[c] = with_plain_nan(formula.slope);
  }
  [[nodiscard]] constexpr InputGradientArrays<const Number> from(std::int64_t c) const noexcept {
    return {mean_hi + c, mean_lo + c, scale + c, mean_dy + c, slope + c};
  }
};

// The same for ActivatedInputGradient.
template <class Number>
struct ActivatedInputGradientArrays {
  InputGradientArrays<Number> input_gradient;
  Number* bias;  // [C]

  [[nodiscard]] constexpr ActivatedInputGradientArrays<const Number> from(
      std::int64_t c) const noexcept {
    return {input_gradient.from(c), bias + c};
  }
};

// Whether an output is read again soon, or should bypass the cache.
enum class Stores { kCached, kStreaming };

// The work of one thread for one element type. Sums of at most kTilesBetweenCarries tiles are added
// to canonical limbs, which the caller must then canonicalize again.
template <class Element>
struct ElementKernels {
  using Real = Arithmetic<Element>;

  void (*add_moments)(const TensorView& x, TileRange tiles, LimbsView limbs);
  void (*add_gradient_sums)(const TensorView& x, const TensorView& dy, const Real* mean_hi,
                            TileRange tiles, LimbsView limbs);
  // Both go through the tiles backwards, because the previous sweep has left the last ones in the
  // cache.
  void (*normalize)(const TensorView& x, const NormalizeArrays<const Real>& formulas,
                    TileRange tiles, Stores stores, const MutableTensorView& y);
  void (*input_gradient)(const TensorView& x, const TensorView& dy,
                         const InputGradientArrays<const Real>& formulas, TileRange tiles,
                         Stores stores, const MutableTensorView& dx);

  // The same as the functions of Kernels with these names. dz is read again at once, so its stores
  // are cached.
  void (*normalize_activated)(const TensorView& x, const NormalizeArrays<const Real>& formulas,
                              const ActivationFunction& activation, const TensorView& residual,
                              TileRange tiles, Stores stores, const MutableTensorView& y);
  void (*activation_gradient)(const TensorView& x, const TensorView& dy,
                              const NormalizeArrays<const Real>& formulas,
                              const ActivationFunction& activation, TileRange tiles,
                              const MutableTensorView& dz);
  void (*gradient_of_output)(const TensorView& y, const TensorView& dy,
                             const ActivationFunction& activation, TileRange tiles,
                             const MutableTensorView& dz);
  void (*add_activated_gradient_sums)(const TensorView& x, const TensorView& dy,
                                      const NormalizeArrays<const Real>& formulas,
                                      const ActivationFunction& activation, TileRange tiles,
                                      LimbsView limbs);
  void (*activated_input_gradient)(const TensorView& x, const TensorView& dy,
                                   const ActivatedInputGradientArrays<const Real>& formulas,
                                   const ActivationFunction& activation, TileRange tiles,
                                   Stores stores, const MutableTensorView& dx);
};

// The kernels of one instruction set, compiled once for each set. They are serial, and use nothing
// (containers, standard algorithms) whose code another translation unit might share.
struct Target {
  std::string_view name;
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

}  // namespace normscope::cpu
