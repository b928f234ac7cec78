// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "normscope/core/activation.h"
#include "normscope/core/execution.h"
#include "normscope/core/export.h"
#include "normscope/core/limbs.h"
#include "normscope/core/tensor_view.h"
#include "normscope/kernels/channel_view.h"
#include "normscope/kernels/results.h"
#include "normscope/kernels/statistics.h"

namespace normscope NORMSCOPE_EXPORT {

// One backend for the host's memory. Tensors have a kernel layout (TensorView::has_kernel_layout),
// dy, y and dx that of x; channel views hold x.channels entries. Nothing throws but what
// `execution.parallel_for` throws.
struct Kernels {
  std::string_view name;

  // Whether this machine can run it.
  bool (*can_run)();

  // How many channels at a time keep `tensors` tensors of x's size in the caches between the sweep
  // that sums and the sweep that applies; x.channels where there is nothing to gain.
  std::int64_t (*channels_per_chunk)(const TensorView& x, int tensors, int threads);

  // limbs += sums of x and x^2, in canonical form.
  void (*add_moments)(const Execution& execution, const TensorView& x, LimbsView limbs);

  void (*finalize_moments)(const Execution& execution, LimbsView limbs, double count, double eps,
                           DType x_dtype, const MomentsResults& results);

  // y = weight * xhat + bias.
  void (*normalize)(const Execution& execution, const TensorView& x, Statistics statistics,
                    ChannelView weight, ChannelView bias, const MutableTensorView& y);

  // limbs += sums of dy and dy * (x - mean_hi), in canonical form.
  void (*add_gradient_sums)(const Execution& execution, const TensorView& x, const TensorView& dy,
                            Statistics statistics, LimbsView limbs);

  void (*finalize_gradient_sums)(const Execution& execution, LimbsView limbs, Statistics statistics,
                                 const GradientResults& results);

  // dx = weight * inv_std * (dy - g1 / n - xhat * g2 / n).
  void (*input_gradient)(const Execution& execution, const TensorView& x, const TensorView& dy,
                         Statistics statistics, ChannelView weight, GradientSums sums, double count,
                         const MutableTensorView& dx);

  // With an activation after it, z = weight * xhat + bias. Each operation is rounded to x's dtype,
  // as if it were made alone. A residual (data nullptr: none) has x's shape, dtype and layout, and
  // needs an activation that ActivationFunction::output_tells_gradient().

  // y = activation(z + residual).
  void (*normalize_activated)(const Execution& execution, const TensorView& x,
                              Statistics statistics, ChannelView weight, ChannelView bias,
                              const ActivationFunction& activation, const TensorView& residual,
                              const MutableTensorView& y);

  // dz = dy * activation'(z).
  void (*activation_gradient)(const Execution& execution, const TensorView& x, const TensorView& dy,
                              Statistics statistics, ChannelView weight, ChannelView bias,
                              const ActivationFunction& activation, const MutableTensorView& dz);

  // The same from y, if the activation's output tells its gradient.
  void (*gradient_of_output)(const Execution& execution, const TensorView& y, const TensorView& dy,
                             const ActivationFunction& activation, const MutableTensorView& dz);

  // add_gradient_sums and input_gradient with dz = dy * activation'(z) for dy, which is kept
  // nowhere; for activations that are clips.
  void (*add_activated_gradient_sums)(const Execution& execution, const TensorView& x,
                                      const TensorView& dy, Statistics statistics,
                                      ChannelView weight, ChannelView bias,
                                      const ActivationFunction& activation, LimbsView limbs);
  void (*activated_input_gradient)(const Execution& execution, const TensorView& x,
                                   const TensorView& dy, Statistics statistics, ChannelView weight,
                                   ChannelView bias, const ActivationFunction& activation,
                                   GradientSums sums, double count, const MutableTensorView& dx);
};

// Every backend that was built: the reference first, then from the plainest to the fastest.
[[nodiscard]] std::span<const Kernels* const> built_kernels();

// Those of them that this machine can run.
[[nodiscard]] std::span<const Kernels* const> available_kernels();

// The fastest available one, or the one that the environment variable NORMSCOPE_KERNELS names (read
// once). Throws ArgumentError, with the names, where that one is not available.
[[nodiscard]] const Kernels& default_kernels();

// The available backend called `name`. Throws ArgumentError, with the names.
[[nodiscard]] const Kernels& kernels_named(std::string_view name);

}  // namespace normscope
