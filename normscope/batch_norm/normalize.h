// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/batch_norm/device_step.h"
#include "normscope/core/activation.h"
#include "normscope/kernels/kernels.h"

namespace normscope {

// The sweep that writes y on a device, with the step's coefficients.
inline void normalize_on_device(const DeviceStep& step, const TensorView& x,
                                const ActivationFunction& activation, const TensorView& residual,
                                const MutableTensorView& y) {
  const DeviceKernels& kernels = *step.device.kernels;
  if (activation.kind == Activation::kNone) {
    kernels.normalize(step.device.stream, x, step.batches, step.coefficients, y);
  } else {
    kernels.normalize_activated(step.device.stream, x, step.batches, step.coefficients, activation,
                                residual, y);
  }
}

}  // namespace normscope
