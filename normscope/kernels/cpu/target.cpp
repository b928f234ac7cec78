// SPDX-License-Identifier: Apache-2.0
//
// The table of one instruction set, and its functions on limbs. Compiled once for each set.

#include "normscope/kernels/cpu/target.h"

#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "normscope/core/cache_lines.h"
#include "normscope/core/element.h"
#include "normscope/core/formulas.h"

namespace normscope::cpu::NORMSCOPE_TARGET {
namespace {

#include "normscope/kernels/cpu/vector.h"
// After the vectors that it sums.
#include "normscope/kernels/cpu/limb_sums.h"

// The instruction sets that kernels/CMakeLists.txt compiles for.
bool can_run() {
#if defined(__AVX512F__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("fma");
#else
  return true;
#endif
}

void canonicalize_limbs(LimbsView limbs) {
  for (int sum = 0; sum < kSums; ++sum) {
    for_channels(limbs.channels, [&]<class Real>(std::int64_t c, Real) {
      Real values[kLimbs];
      load_canonical(limbs, sum, c, values);
      for (int k = 0; k < kLimbs; ++k) store_bytes(limbs.limb(sum, k) + c, values[k]);
    });
  }
}

void add_limbs(LimbsView from, LimbsView to) {
  for (int sum = 0; sum < kSums; ++sum) {
    for (int k = 0; k < kLimbs; ++k) {
      for_channels(to.channels, [&]<class Real>(std::int64_t c, Real) {
        double* limb = to.limb(sum, k) + c;
        store_bytes(limb, load_bytes<Real>(limb) + load_bytes<Real>(from.limb(sum, k) + c));
      });
    }
  }
}

void moments_of_limbs(LimbsView limbs, double count, MutableStatistics to) {
  for_channels(limbs.channels, [&]<class Real>(std::int64_t c, Real zero) {
    Real sum[kLimbs];
    Real sum_of_squares[kLimbs];
    load_canonical(limbs, kSumOfValues, c, sum);
    load_canonical(limbs, kSumOfProducts, c, sum_of_squares);
    const Moments<Real> result = moments(total(sum), total(sum_of_squares), zero + count);
    store_bytes(to.mean_hi + c, result.mean.hi);
    store_bytes(to.mean_lo + c, result.mean.lo);
    store_bytes(to.inv_std + c, result.population_variance);
  });
}

void gradient_sums_of_limbs(LimbsView limbs, Statistics statistics, GradientSums sums) {
  for_channels(limbs.channels, [&]<class Real>(std::int64_t c, Real) {
    Real dy[kLimbs];
    Real dy_centered[kLimbs];
    load_canonical(limbs, kSumOfValues, c, dy);
    load_canonical(limbs, kSumOfProducts, c, dy_centered);
    const DoubleDouble<Real> sum_dy = total(dy);
    store_bytes(sums.dy + c, sum_dy.hi + sum_dy.lo);
    store_bytes(sums.dy_xhat + c, gradient_sum_with_xhat(sum_dy, total(dy_centered),
                                                         load_bytes<Real>(statistics.mean_lo + c),
                                                         load_bytes<Real>(statistics.inv_std + c)));
  });
}

}  // namespace

constinit const Target kTarget{
    .can_run = can_run,
    .float32 = &kFloat32,
    .float64 = &kFloat64,
    .bfloat16 = &kBFloat16,
    .float16 = &kFloat16,
    .add_limbs = add_limbs,
    .canonicalize = canonicalize_limbs,
    .moments = moments_of_limbs,
    .gradient_sums = gradient_sums_of_limbs,
};

}  // namespace normscope::cpu::NORMSCOPE_TARGET
