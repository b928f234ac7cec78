// SPDX-License-Identifier: Apache-2.0
#pragma once

// Marks a namespace in a header whose declarations programs may use when they link the shared
// library. All other symbols of the library are hidden.
#define NORMSCOPE_EXPORT __attribute__((visibility("default")))

// For arithmetic that several instruction sets and the device share. Always inlined: otherwise the
// linker could choose a copy compiled for a newer instruction set for all translation units.
#if defined(__CUDACC__)
#define NORMSCOPE_INLINE __host__ __device__ __forceinline__
#else
#define NORMSCOPE_INLINE inline __attribute__((always_inline))
#endif
