// SPDX-License-Identifier: Apache-2.0
#define NORMSCOPE_TARGET kAvx2
#define NORMSCOPE_TARGET_NAME "avx2"
#define NORMSCOPE_TARGET_RUNS \
  __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma")
#include "normscope/kernels/cpu/target.inc"
