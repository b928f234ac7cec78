// SPDX-License-Identifier: Apache-2.0
#define NORMSCOPE_TARGET kAvx512
#define NORMSCOPE_TARGET_NAME "avx512"
#define NORMSCOPE_TARGET_RUNS                                                \
  __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && \
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
#include "normscope/kernels/cpu/target.inc"
