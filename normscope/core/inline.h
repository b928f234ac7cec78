// SPDX-License-Identifier: Apache-2.0
#pragma once

// For arithmetic that several instruction sets and the device share. Always inlined: otherwise the
// linker could choose a copy compiled for a newer instruction set for all translation units.
#if defined(__CUDACC__)
#define NORMSCOPE_INLINE __host__ __device__ __forceinline__
#else
#define NORMSCOPE_INLINE inline __attribute__((always_inline))
#endif
