// SPDX-License-Identifier: Apache-2.0
#define NORMSCOPE_ELEMENT double
#define NORMSCOPE_KERNELS kFloat64
#include "normscope/kernels/cpu/element_kernels.inc"
