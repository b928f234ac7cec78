// SPDX-License-Identifier: Apache-2.0
//
// Sums of a vector's elements. Included once by each target (vector.h says why).

// Sums N vectors of N elements each at once: element i of the result is the sum of vector i. Each
// sum adds the upper half of the vector to its lower half, and so on.
//
// Each step halves all vectors, and interleaves the results for two of them. x = (x0, x1, ...)
// consists of groups of kGroup elements, one group per original vector. The sums of x's halves and
// of y's halves then form the vector (x0, y0, x1, y1, ...).
template <int kGroup, int kHalf, class AnyVector, std::size_t... kIndices>
NORMSCOPE_INLINE AnyVector halves_of(AnyVector x, AnyVector y, std::index_sequence<kIndices...>) {
  constexpr std::size_t kSize = sizeof...(kIndices);
  constexpr std::size_t kWidth = kGroup / 2;
  return __builtin_shufflevector(x, y,
                                 (kIndices / kWidth % 2 * kSize + kIndices / kGroup * kGroup +
                                  kHalf * kWidth + kIndices % kWidth)...);
}

template <class Real, int kCount = kLanesOf<Real>>
NORMSCOPE_INLINE Vector<Real> fold_across(const Vector<Real> (&vectors)[kCount]) {
  if constexpr (kCount == 1) {
    return vectors[0];
  } else {
    constexpr auto kIndices = std::make_index_sequence<kLanesOf<Real>>{};
    Vector<Real> halved[kCount / 2];
    for (int i = 0; i < kCount / 2; ++i) {
      halved[i] = halves_of<kCount, 0>(vectors[i], vectors[i + kCount / 2], kIndices) +
                  halves_of<kCount, 1>(vectors[i], vectors[i + kCount / 2], kIndices);
    }
    return fold_across<Real, kCount / 2>(halved);
  }
}
