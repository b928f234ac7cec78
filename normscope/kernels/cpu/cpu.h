// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/kernels/kernels.h"

namespace normscope::cpu {

// One backend for each instruction set, from the same source; from the plainest to the widest.
// Which ones a machine can run is told by Kernels::can_run.
extern const Kernels kBaselineKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

}  // namespace normscope::cpu
