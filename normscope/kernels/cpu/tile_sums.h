// SPDX-License-Identifier: Apache-2.0
//
// The two sums of a tile, in the tree of core/tiles.h. Included once by each target (vector.h says
// why).
//
// What is added is told by the terms of an element: first and second.

template <class Value>
struct Terms {
  Value first;
  Value second;

  NORMSCOPE_INLINE Terms operator+(const Terms& other) const {
    return {first + other.first, second + other.second};
  }
};

// sum(x - a) and sum((x - a)^2)
template <class Element>
struct MomentTerms {
  using ElementType = Element;
  using Real = Arithmetic<Element>;
  const Element* x;

  template <class Value>
  static NORMSCOPE_INLINE Terms<Value> of(Value x, Value /*dy*/, Value pivot) {
    const Value centered = subtract(x, pivot);
    return {centered, centered * centered};
  }
  NORMSCOPE_INLINE Terms<Vector<Real>> load_at(std::int64_t i, Vector<Real> pivot) const {
    return of(load(x + i), pivot, pivot);
  }
  // Calls use(v, terms) for the vectors of a block, or of its first `count` elements.
  template <class Use>
  NORMSCOPE_INLINE void for_block_at(std::int64_t i, Vector<Real> pivot, const Use& use) const {
    const auto block = load_block(x + i);
    for (int v = 0; v < kBlockVectors<Element>; ++v) use(v, of(block.vectors[v], pivot, pivot));
  }
  template <class Use>
  NORMSCOPE_INLINE void for_partial_block_at(std::int64_t i, std::int64_t count, Vector<Real> pivot,
                                             const Use& use) const {
    const auto block = load_partial_block(x + i, count);
    for (int v = 0; v < kBlockVectors<Element>; ++v) use(v, of(block.vectors[v], pivot, pivot));
  }
  NORMSCOPE_INLINE void prefetch_at(std::int64_t i, std::int64_t count) const {
    for (std::int64_t j = i; j < i + count; j += kLineElements<Element>) prefetch(x + j);
  }
  template <class Value>
  NORMSCOPE_INLINE Terms<Value> scalar_at(std::int64_t i, Value pivot) const {
    return of(static_cast<Value>(widen(x[i])), pivot, pivot);
  }
};

// sum(dy) and sum(dy (x - mean))
template <class Element>
struct GradientTerms {
  using ElementType = Element;
  using Real = Arithmetic<Element>;
  const Element* x;
  const Element* dy;

  template <class Value>
  static NORMSCOPE_INLINE Terms<Value> of(Value x, Value dy, Value mean) {
    return {dy, dy * subtract(x, mean)};
  }
  NORMSCOPE_INLINE Terms<Vector<Real>> load_at(std::int64_t i, Vector<Real> mean) const {
    return of(load(x + i), load(dy + i), mean);
  }
  template <class Use>
  NORMSCOPE_INLINE void for_block_at(std::int64_t i, Vector<Real> mean, const Use& use) const {
    const auto x_block = load_block(x + i);
    const auto dy_block = load_block(dy + i);
    for (int v = 0; v < kBlockVectors<Element>; ++v) {
      use(v, of(x_block.vectors[v], dy_block.vectors[v], mean));
    }
  }
  template <class Use>
  NORMSCOPE_INLINE void for_partial_block_at(std::int64_t i, std::int64_t count, Vector<Real> mean,
                                             const Use& use) const {
    const auto x_block = load_partial_block(x + i, count);
    const auto dy_block = load_partial_block(dy + i, count);
    for (int v = 0; v < kBlockVectors<Element>; ++v) {
      use(v, of(x_block.vectors[v], dy_block.vectors[v], mean));
    }
  }
  NORMSCOPE_INLINE void prefetch_at(std::int64_t i, std::int64_t count) const {
    for (std::int64_t j = i; j < i + count; j += kLineElements<Element>) {
      prefetch(x + j);
      prefetch(dy + j);
    }
  }
  template <class Value>
  NORMSCOPE_INLINE Terms<Value> scalar_at(std::int64_t i, Value mean) const {
    return of(static_cast<Value>(widen(x[i])), static_cast<Value>(widen(dy[i])), mean);
  }
};

// Vectors that hold a tile's lanes.
template <class Real>
inline constexpr int kLaneVectors = kMaxLanes / kLanesOf<Real>;

// Adds the upper half of the lanes to the lower, and so on, until kVectors vectors are left, the
// first ones.
template <int kVectors, class AnyVector, std::size_t kSize>
NORMSCOPE_INLINE void fold_halves(AnyVector (&lanes)[kSize]) {
  for (int half = static_cast<int>(kSize) / 2; half >= kVectors; half /= 2) {
    for (int v = 0; v < half; ++v) lanes[v] += lanes[v + half];
  }
}

// The lanes of as many channels as a vector has elements, folded to a vector a channel; to two
// where the lanes lie in the order of interleaved blocks.
template <class Element>
struct FoldedLanes {
  using Real = Arithmetic<Element>;
  static constexpr int kVectors = kBlockIsInterleaved<Element> ? 2 : 1;
  Vector<Real> vectors[kVectors][kLanesOf<Real>];

  // To one number a channel.
  NORMSCOPE_INLINE Vector<Real> fold() const {
    if constexpr (kVectors == 1) return fold_across<Real>(vectors[0]);
    return fold_across<Real>(vectors[0]) + fold_across<Real>(vectors[kVectors - 1]);
  }
};

// n elements, fewer than a vector, then zeros.
template <class Element, class Real = Arithmetic<Element>>
[[gnu::noinline]] Vector<Real> load_few(const Element* x, std::int64_t n) {
  Real few[kLanesOf<Real>] = {};
  for (std::int64_t i = 0; i < n; ++i) few[i] = widen(x[i]);
  return load(few);
}

// Vector v of n elements, of which it holds at least one; then zeros.
template <class Element>
NORMSCOPE_INLINE auto load_vector_of_lanes(const Element* x, std::int64_t v, std::int64_t n) {
  using Real = Arithmetic<Element>;
  constexpr int kWidth = kLanesOf<Real>;
  const std::int64_t valid = n - v * kWidth;
  if (valid >= kWidth) return load(x + v * kWidth);
  if (v == 0) return load_few(x, n);
  return first_elements<Real>(load_partial(x + v * kWidth, valid), valid);
}

template <class Element, std::size_t... kIndices>
NORMSCOPE_INLINE auto gather(const Element* x, std::int64_t stride,
                             std::index_sequence<kIndices...>) {
  using Real = Arithmetic<Element>;
  return Vector<Real>{widen(x[static_cast<std::int64_t>(kIndices) * stride])...};
}

// As many elements as there are lanes, `stride` apart, one a lane: the lanes folded to a vector.
template <class Element, class Real = Arithmetic<Element>>
NORMSCOPE_INLINE Vector<Real> fold_elements(const Element* x, std::int64_t stride) {
  constexpr int kWidth = kLanesOf<Real>;
  Vector<Real> lanes[kLaneVectors<Real>];
#pragma GCC unroll 1  // else GCC 12 keeps 64 addresses, in memory
  for (int v = 0; v < kLaneVectors<Real>; ++v) {
    lanes[v] = gather(x, stride, std::make_index_sequence<kWidth>{});
    x += kWidth * stride;
  }
  fold_halves<1>(lanes);
  return lanes[0];
}

// Lanes in memory: where elements come one at a time.
struct LanesInFloat64 {
  alignas(kVectorBytes) double values[kMaxLanes] = {};

  NORMSCOPE_INLINE double fold() const {
    Doubles lanes[kLaneVectors<double>];
    for (int v = 0; v < kLaneVectors<double>; ++v) lanes[v] = load(values + v * kDoubles);
    fold_halves<1>(lanes);
    return fold_vector<double>(lanes[0]);
  }
};

// The pivot of a tile whose elements are `stride` apart, in float64 but for its last rounding.
template <class Element>
[[gnu::noinline]] double pivot_in_float64(Layout layout, const Element* x, std::int64_t stride,
                                          std::int64_t n) {
  const PivotSamples samples = pivot_samples(layout, n);
  LanesInFloat64 lanes;
  for (std::int64_t j = 0; j < samples.count; ++j) {
    lanes.values[j] = static_cast<double>(widen(x[j * samples.stride * stride]));
  }
  return static_cast<double>(
      static_cast<Arithmetic<Element>>(lanes.fold() / static_cast<double>(samples.count)));
}

// The sums again, in float64: where float32 has overflowed, or shows what is not finite.
template <class AnyTerms>
[[gnu::noinline]] Terms<double> sums_in_float64(Layout layout, const AnyTerms& terms,
                                                std::int64_t stride, std::int64_t n,
                                                double center) {
  LanesInFloat64 first;
  LanesInFloat64 second;
  for (std::int64_t i = 0; i < n; ++i) {
    const Terms<double> term = terms.scalar_at(i * stride, center);
    first.values[lane_of(layout, i)] += term.first;
    second.values[lane_of(layout, i)] += term.second;
  }
  return {first.fold(), second.fold()};
}

template <class AnyTerms>
NORMSCOPE_INLINE void put_sums_in_float64(Layout layout, const AnyTerms& terms, std::int64_t stride,
                                          std::int64_t n, double center, TileBatch& batch,
                                          std::int64_t slot) {
  const Terms<double> sums = sums_in_float64(layout, terms, stride, n, center);
  batch.first[slot] = sums.first;
  batch.second[slot] = sums.second;
}

template <class Element>
NORMSCOPE_INLINE void put_moments_in_float64(Layout layout, const MomentTerms<Element>& terms,
                                             std::int64_t stride, std::int64_t n, TileBatch& batch,
                                             std::int64_t slot) {
  batch.pivot[slot] = pivot_in_float64(layout, terms.x, stride, n);
  put_sums_in_float64(layout, terms, stride, n, batch.pivot[slot], batch, slot);
}

// Sums n neighbouring elements, at least as many as there are lanes, as channel i of the two: lane
// l takes l, l + 64, ...
template <class AnyTerms, class Element = typename AnyTerms::ElementType,
          class Real = typename AnyTerms::Real>
NORMSCOPE_INLINE void sum_neighbours(const AnyTerms& terms, std::int64_t n, Real center,
                                     FetchAhead<AnyTerms> fetch_ahead, int i,
                                     FoldedLanes<Element>& first, FoldedLanes<Element>& second) {
  // As many vectors at a time as leave room in 16 registers.
  constexpr int kVectors = 4;
  constexpr int kBlocks = kVectors / kBlockVectors<Element>;
  constexpr std::int64_t kBlockElements = kBlockVectors<Element> * kLanesOf<Real>;
  constexpr std::int64_t kLanes = kChannelsFirstTile.lanes;
  const Vector<Real> centers = broadcast(center);
  const std::int64_t rows = n / kLanes;
  const std::int64_t rest = n % kLanes;
  Vector<Real> lane_first[kLaneVectors<Real>];
  Vector<Real> lane_second[kLaneVectors<Real>];
#pragma GCC unroll 8
  for (int begin = 0; begin < kLaneVectors<Real>; begin += kVectors) {
    const std::int64_t first_lane = begin * kLanesOf<Real>;
    Vector<Real> chain_first[kVectors] = {};
    Vector<Real> chain_second[kVectors] = {};
    for (std::int64_t row = 0; row < rows; ++row) {
      fetch_ahead(kVectors * kLanesOf<Real>);
      for (int b = 0; b < kBlocks; ++b) {
        terms.for_block_at(row * kLanes + first_lane + b * kBlockElements, centers,
                           [&](int v, const Terms<Vector<Real>>& term) {
                             chain_first[b * kBlockVectors<Element> + v] += term.first;
                             chain_second[b * kBlockVectors<Element> + v] += term.second;
                           });
      }
    }
    for (int b = 0; b < kBlocks; ++b) {
      const std::int64_t left = rest - first_lane - b * kBlockElements;
      if (left <= 0) break;
      const std::int64_t count = smaller(left, kBlockElements);
      terms.for_partial_block_at(rows * kLanes + first_lane + b * kBlockElements, count, centers,
                                 [&](int v, const Terms<Vector<Real>>& term) {
                                   const std::int64_t valid = count_in_vector<Element>(count, v);
                                   chain_first[b * kBlockVectors<Element> + v] +=
                                       first_elements<Real>(term.first, valid);
                                   chain_second[b * kBlockVectors<Element> + v] +=
                                       first_elements<Real>(term.second, valid);
                                 });
    }
    for (int v = 0; v < kVectors; ++v) {
      lane_first[begin + v] = chain_first[v];
      lane_second[begin + v] = chain_second[v];
    }
  }
  fetch_ahead(rest);
  fold_halves<FoldedLanes<Element>::kVectors>(lane_first);
  fold_halves<FoldedLanes<Element>::kVectors>(lane_second);
  for (int v = 0; v < FoldedLanes<Element>::kVectors; ++v) {
    first.vectors[v][i] = lane_first[v];
    second.vectors[v][i] = lane_second[v];
  }
}

// Sums kVectors vectors of channels over n rows, `row_stride` elements apart: lane l takes the rows
// 32 l to 32 l + 31. center, first, second [kVectors * width].
template <int kVectors, class AnyTerms, class Real = typename AnyTerms::Real>
NORMSCOPE_INLINE void sums_of_rows(const AnyTerms& terms, std::int64_t row_stride, std::int64_t n,
                                   const Real* center, FetchAhead<AnyTerms>& fetch_ahead,
                                   Real* first, Real* second) {
  constexpr int kWidth = kLanesOf<Real>;
  constexpr std::int64_t kLanes = kChannelsLastTile.lanes;
  constexpr std::int64_t kChain = kChannelsLastTile.chain;
  Vector<Real> lane_first[kLanes][kVectors];
  Vector<Real> lane_second[kLanes][kVectors];
  for (std::int64_t lane = 0; lane < kLanes; ++lane) {
    const std::int64_t end = n < (lane + 1) * kChain ? n : (lane + 1) * kChain;
    Vector<Real> centers[kVectors];
    Vector<Real> chain_first[kVectors] = {};
    Vector<Real> chain_second[kVectors] = {};
    for (int v = 0; v < kVectors; ++v) centers[v] = load(center + v * kWidth);
    for (std::int64_t row = lane * kChain; row < end; ++row) {
      fetch_ahead(kVectors * kWidth);
      for (int v = 0; v < kVectors; ++v) {
        const auto term = terms.load_at(row * row_stride + v * kWidth, centers[v]);
        chain_first[v] += term.first;
        chain_second[v] += term.second;
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      lane_first[lane][v] = chain_first[v];
      lane_second[lane][v] = chain_second[v];
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    store(first + v * kWidth,
          (lane_first[0][v] + lane_first[2][v]) + (lane_first[1][v] + lane_first[3][v]));
    store(second + v * kWidth,
          (lane_second[0][v] + lane_second[2][v]) + (lane_second[1][v] + lane_second[3][v]));
  }
}
