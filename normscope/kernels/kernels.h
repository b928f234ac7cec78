// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "normscope/core/activation.h"
#include "normscope/core/attributes.h"
#include "normscope/core/execution.h"
#include "normscope/core/limbs.h"
#include "normscope/core/tensor_view.h"
#include "normscope/kernels/channel_view.h"
#include "normscope/kernels/results.h"
#include "normscope/kernels/statistics.h"

namespace normscope NORMSCOPE_EXPORT {

// What a layer does with xhat: z = weight * xhat + bias, and the activation of z.
struct AffineActivation {
  ChannelView weight = {};  // without data: 1
  ChannelView bias = {};    // without data: 0
  ActivationFunction activation = {};
};

// One backend for host memory. Tensors have a kernel layout (TensorView::has_kernel_layout); dy, y
// and dx have the layout of x. Channel views hold x.channels entries. Nothing throws, except what
// `execution.parallel_for` throws.
//
// Every operation of an activation is rounded to x's dtype, as if it were a separate op.
struct Kernels {
  std::string_view name;

  // Whether this machine can run it.
  bool (*can_run)();

  // Adds the sums of x and x^2 to the limbs, which end in canonical form.
  void (*add_moments)(const Execution& execution, const TensorView& x, LimbsView limbs);

  void (*finalize_moments)(const Execution& execution, LimbsView limbs, double count, double eps,
                           DType x_dtype, const MomentsResults& results);

  // y = activation(z + residual). A residual (data nullptr: none) has x's shape, dtype and layout.
  // It requires an activation with output_tells_gradient().
  void (*normalize)(const Execution& execution, const TensorView& x, Statistics statistics,
                    const AffineActivation& affine, const TensorView& residual,
                    const MutableTensorView& y);

  // Adds the sums of dz and dz * (x - mean_hi) to the limbs, which end in canonical form. Here and
  // in input_gradient, dz = dy * activation'(z) is computed on the fly and not stored; the
  // activation is none, or one with is_clip().
  void (*add_gradient_sums)(const Execution& execution, const TensorView& x, const TensorView& dy,
                            Statistics statistics, const AffineActivation& affine, LimbsView limbs);

  void (*finalize_gradient_sums)(const Execution& execution, LimbsView limbs, Statistics statistics,
                                 const GradientResults& results);

  // dx = weight * inv_std * (dz - g1 / n - xhat * g2 / n).
  void (*input_gradient)(const Execution& execution, const TensorView& x, const TensorView& dy,
                         Statistics statistics, const AffineActivation& affine, GradientSums sums,
                         double count, const MutableTensorView& dx);

  // dz = dy * activation'(z), for any activation.
  void (*activation_gradient)(const Execution& execution, const TensorView& x, const TensorView& dy,
                              Statistics statistics, const AffineActivation& affine,
                              const MutableTensorView& dz);

  // The same from y, for activations with output_tells_gradient().
  void (*gradient_of_output)(const Execution& execution, const TensorView& y, const TensorView& dy,
                             const ActivationFunction& activation, const MutableTensorView& dz);
};

// All backends that were built: the reference first, then from the plainest to the fastest.
[[nodiscard]] std::span<const Kernels* const> built_kernels();

// The built backends that this machine can run.
[[nodiscard]] std::span<const Kernels* const> available_kernels();

// The fastest available backend, or the one named by the environment variable NORMSCOPE_KERNELS
// (read once). Throws ArgumentError, which lists the names, if that one is not available.
[[nodiscard]] const Kernels& default_kernels();

// check_environment(), and the name in NORMSCOPE_KERNELS, without choosing kernels for good.
void check_all_variables();

// The available backend called `name`. Throws ArgumentError, which lists the names, if there is
// none.
[[nodiscard]] const Kernels& kernels_named(std::string_view name);

}  // namespace normscope
