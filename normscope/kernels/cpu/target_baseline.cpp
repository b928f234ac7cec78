// SPDX-License-Identifier: Apache-2.0
//
// Runs on every machine of the architecture that is compiled for: SSE2 on x86-64.
#define NORMSCOPE_TARGET kBaseline
#define NORMSCOPE_TARGET_NAME "baseline"
#define NORMSCOPE_TARGET_RUNS true
#include "normscope/kernels/cpu/target.inc"
