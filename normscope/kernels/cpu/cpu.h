// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/kernels/kernels.h"

namespace normscope::cpu {

// One backend per instruction set, compiled from the same source; from the plainest to the widest.
// Kernels::can_run tells which of them a machine can run.
extern const Kernels kBaselineKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

}  // namespace normscope::cpu
