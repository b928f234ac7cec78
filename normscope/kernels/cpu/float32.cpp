// SPDX-License-Identifier: Apache-2.0
#define NORMSCOPE_ELEMENT float
#define NORMSCOPE_KERNELS kFloat32
#include "normscope/kernels/cpu/element_kernels.inc"
