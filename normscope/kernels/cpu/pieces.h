// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include "normscope/core/element.h"
#include "normscope/core/limbs.h"
#include "normscope/core/tensor_view.h"
#include "normscope/kernels/kernels.h"

namespace normscope::cpu {

// Tiles of a tensor: sample by sample, in each sample by position; every one for all of the
// tensor's channels.
struct TileRange {
  std::int64_t begin;
  std::int64_t end;
};

// The rows of an output, a position's channels each. Where they are whole cache lines, coefficients
// lie as the vectors of a block hold elements (vector.h), which saves sorting the elements; else as
// the channels do.
enum class Rows { kAny, kWholeLines };

// Per-channel coefficients of the formulas Normalize and InputGradient, in the type of the
// arithmetic.
template <class Real>
struct NormalizeCoefficients {
  Rows rows;
  const Real* mean_hi;  // [C]
  const Real* mean_lo;  // [C]
  const Real* scale;    // [C]
  const Real* bias;     // [C]

  // From channel c on, which begins a block.
  [[nodiscard]] constexpr NormalizeCoefficients from(std::int64_t c) const noexcept {
    return {rows, mean_hi + c, mean_lo + c, scale + c, bias + c};
  }
};
template <class Real>
struct InputGradientCoefficients {
  Rows rows;
  const Real* mean_hi;  // [C]
  const Real* mean_lo;  // [C]
  const Real* scale;    // [C]
  const Real* mean_dy;  // [C]
  const Real* slope;    // [C]

  // From channel c on, which begins a block.
  [[nodiscard]] constexpr InputGradientCoefficients from(std::int64_t c) const noexcept {
    return {rows, mean_hi + c, mean_lo + c, scale + c, mean_dy + c, slope + c};
  }
};

// Whether an output is read soon, or better passes the cache by.
enum class Stores { kCached, kStreaming };

// Whether inputs lie in a cache, or have to be fetched from memory.
enum class Loads { kCached, kFetched };

// How a sweep that applies meets the caches.
struct Access {
  Loads loads;
  Stores stores;
};

// The work of one thread for one element type. At most kTilesBetweenCarries tiles a call for sums;
// limbs are added to and left in canonical form.
template <class Element>
struct ElementPieces {
  using Real = Arithmetic<Element>;

  // Elements of a block whose first vector holds those of even index, its second one the others; 0
  // where blocks are in order.
  std::int64_t interleaved_block;

  void (*add_moments)(const TensorView& x, TileRange tiles, LimbsView limbs);
  void (*add_gradient_sums)(const TensorView& x, const TensorView& dy, const Real* mean_hi,
                            TileRange tiles, LimbsView limbs);
  // Both go through the tiles backwards, since the sweep before has left the last ones in the
  // cache.
  void (*normalize)(const TensorView& x, const NormalizeCoefficients<Real>& coefficients,
                    TileRange tiles, Access access, const MutableTensorView& y);
  void (*input_gradient)(const TensorView& x, const TensorView& dy,
                         const InputGradientCoefficients<Real>& coefficients, TileRange tiles,
                         Access access, const MutableTensorView& dx);
};

// What is compiled once for each instruction set: serial, and free of everything (containers,
// standard algorithms) whose code another translation unit might share.
struct Pieces {
  std::string_view name;
  bool (*can_run)();

  ElementPieces<float> float32;
  ElementPieces<double> float64;
  ElementPieces<BFloat16> bfloat16;
  ElementPieces<Float16> float16;

  // to += from, in canonical form.
  void (*merge_limbs)(LimbsView from, LimbsView to);

  // mean [C] (as a pair) and population variance [C] of canonical or not yet canonical limbs.
  void (*moments)(LimbsView limbs, double count, double* mean, double* mean_rest,
                  double* population_variance);
  void (*inv_std)(const double* population_variance, double eps, std::int64_t channels,
                  double* inv_std);
  void (*gradient_sums)(LimbsView limbs, Statistics statistics, GradientSums sums);

  template <class Element>
  [[nodiscard]] constexpr const ElementPieces<Element>& of() const noexcept {
    if constexpr (sizeof(Element) == sizeof(double)) {
      return float64;
    } else if constexpr (sizeof(Element) == sizeof(float)) {
      return float32;
    } else if constexpr (requires(Element e, BFloat16 b) { e = b; }) {
      return bfloat16;
    } else {
      return float16;
    }
  }
};

extern const Pieces kBaseline;
extern const Pieces kAvx2;
extern const Pieces kAvx512;

}  // namespace normscope::cpu
