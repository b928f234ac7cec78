// SPDX-License-Identifier: Apache-2.0
#define NORMSCOPE_ELEMENT BFloat16
#define NORMSCOPE_KERNELS kBFloat16
#include "normscope/kernels/cpu/element_kernels.inc"
