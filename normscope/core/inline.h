// SPDX-License-Identifier: Apache-2.0
#pragma once

// Arithmetic that several instruction sets (and later the device) share. Always inlined: a copy
// that one translation unit emitted for a newer instruction set could otherwise be linked into all
// of them.
#if defined(__CUDACC__)
#define NORMSCOPE_INLINE __host__ __device__ __forceinline__
#else
#define NORMSCOPE_INLINE inline __attribute__((always_inline))
#endif
