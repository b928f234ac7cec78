// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/activation.h"
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

// The coefficients of a formula for many channels: an array [C] for each member of the formula, in
// their order. Numbers have the type of the arithmetic on the elements of x.
struct ChannelArrays {
  const void* first = nullptr;
  std::int64_t stride = 0;  // numbers from one array to the next
};

// Whether an output is read again soon, or should bypass the cache.
enum class Stores { kCached, kStreaming };

// The kernels of one instruction set, compiled once for each set: the work of one thread. They use
// nothing (containers, standard algorithms) whose code another translation unit might share.
//
// Each function with the name of one of Kernels does the same. Sums of at most kTilesBetweenCarries
// tiles are added to canonical limbs, which the caller must then canonicalize again. Kernels that
// write a tensor process its tiles in reverse order, because the sweep before has left the last
// ones in the cache. dz is read again at once, so its stores are cached.
//
// The coefficients are those of ActivatedInputGradient for input_gradient, else those of Normalize.
struct Target {
  bool (*can_run)();

  void (*add_limbs)(LimbsView from, LimbsView to);  // to += from
  void (*canonicalize)(LimbsView limbs);

  // Writes the mean as a pair and, in place of inv_std, the population variance. The limbs need not
  // be canonical.
  void (*moments)(LimbsView limbs, double count, MutableStatistics to);
  void (*gradient_sums)(LimbsView limbs, Statistics statistics, GradientSums sums);

  void (*add_moments)(const TensorView& x, TileRange tiles, LimbsView limbs);

  // Without an activation (kNone), only mean_hi is read.
  void (*add_gradient_sums)(const TensorView& x, const TensorView& dy,
                            const ChannelArrays& coefficients, const ActivationFunction& activation,
                            TileRange tiles, LimbsView limbs);

  void (*normalize)(const TensorView& x, const ChannelArrays& coefficients,
                    const ActivationFunction& activation, const TensorView& residual,
                    TileRange tiles, Stores stores, const MutableTensorView& y);

  void (*input_gradient)(const TensorView& x, const TensorView& dy,
                         const ChannelArrays& coefficients, const ActivationFunction& activation,
                         TileRange tiles, Stores stores, const MutableTensorView& dx);

  void (*activation_gradient)(const TensorView& x, const TensorView& dy,
                              const ChannelArrays& coefficients,
                              const ActivationFunction& activation, TileRange tiles,
                              const MutableTensorView& dz);

  void (*gradient_of_output)(const TensorView& y, const TensorView& dy,
                             const ActivationFunction& activation, TileRange tiles,
                             const MutableTensorView& dz);
};

// Everything that is compiled for an instruction set is in a namespace of its name.
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
