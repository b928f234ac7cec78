// SPDX-License-Identifier: Apache-2.0
//
// Sums of a vector's elements. Included once by each target (vector.h says why).

// The sums of as many vectors as each has elements, at once: element i is that of vector i, whose
// upper half is added to its lower, and so on.
//
// Each step halves what is left of every vector, and puts two of them side by side: with x = (x0,
// x1, ...) the groups of kGroup elements that stand for vectors, the sums of x's halves and of y's
// make the vector (x0, y0, x1, y1, ...).
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
