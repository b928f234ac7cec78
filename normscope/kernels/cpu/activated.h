// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/core/activation.h"
#include "normscope/kernels/cpu/target.h"
#include "normscope/kernels/kernels.h"

namespace normscope::cpu {

// The functions of Kernels that apply an activation, for any instruction set.

void normalize_activated(const Target& target, const Execution& execution, const TensorView& x,
                         Statistics statistics, ChannelView weight, ChannelView bias,
                         const ActivationFunction& activation, const TensorView& residual,
                         const MutableTensorView& y);
void activation_gradient(const Target& target, const Execution& execution, const TensorView& x,
                         const TensorView& dy, Statistics statistics, ChannelView weight,
                         ChannelView bias, const ActivationFunction& activation,
                         const MutableTensorView& dz);
void gradient_of_output(const Target& target, const Execution& execution, const TensorView& y,
                        const TensorView& dy, const ActivationFunction& activation,
                        const MutableTensorView& dz);
void add_activated_gradient_sums(const Target& target, const Execution& execution,
                                 const TensorView& x, const TensorView& dy, Statistics statistics,
                                 ChannelView weight, ChannelView bias,
                                 const ActivationFunction& activation, LimbsView limbs);
void activated_input_gradient(const Target& target, const Execution& execution, const TensorView& x,
                              const TensorView& dy, Statistics statistics, ChannelView weight,
                              ChannelView bias, const ActivationFunction& activation,
                              GradientSums sums, double count, const MutableTensorView& dx);

}  // namespace normscope::cpu
