// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/core/element.h"
#include "normscope/kernels/cpu/target.h"

// NORMSCOPE_TARGET is the instruction set that is compiled for, such as avx2. Everything that is
// compiled for it is in a namespace of this name.

namespace normscope::cpu::NORMSCOPE_TARGET {

extern const ElementKernels<float> kFloat32;
extern const ElementKernels<double> kFloat64;
extern const ElementKernels<BFloat16> kBFloat16;
extern const ElementKernels<Float16> kFloat16;

}  // namespace normscope::cpu::NORMSCOPE_TARGET
