// SPDX-License-Identifier: Apache-2.0
#define NORMSCOPE_ELEMENT Float16
#define NORMSCOPE_KERNELS kFloat16
#include "normscope/kernels/cpu/element_kernels.inc"
