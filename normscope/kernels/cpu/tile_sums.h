// SPDX-License-Identifier: Apache-2.0
//
// The two sums of a tile, in the tree of core/tiles.h. Included once by each target (vector.h says why).
//
// What is added is told by Terms: `first` and `second` are the terms of one element, `pad` is an
// element whose terms are zero.

template <class Value>
struct Terms {
  Value first;
  Value second;
};

// sum(x - a) and sum((x - a)^2)
template <class Element>
struct MomentTerms {
  using Real = Arithmetic<Element>;
  const Element* x;

  template <class Value>
  static NORMSCOPE_INLINE Terms<Value> of(Value x, Value /*dy*/, Value pivot) {
    const Value centered = x - pivot;
    return {centered, centered * centered};
  }
  NORMSCOPE_INLINE Terms<Vector<Real>> load_at(std::int64_t i, Vector<Real> pivot) const {
    return of(load(x + i), pivot, pivot);
  }
  template <class Value>
  NORMSCOPE_INLINE Terms<Value> scalar_at(std::int64_t i, Value pivot) const {
    return of(static_cast<Value>(widen(x[i])), pivot, pivot);
  }
};

// sum(dy) and sum(dy (x - mean))
template <class Element>
struct GradientTerms {
  using Real = Arithmetic<Element>;
  const Element* x;
  const Element* dy;

  template <class Value>
  static NORMSCOPE_INLINE Terms<Value> of(Value x, Value dy, Value mean) {
    return {dy, dy * (x - mean)};
  }
  NORMSCOPE_INLINE Terms<Vector<Real>> load_at(std::int64_t i, Vector<Real> mean) const {
    return of(load(x + i), load(dy + i), mean);
  }
  template <class Value>
  NORMSCOPE_INLINE Terms<Value> scalar_at(std::int64_t i, Value mean) const {
    return of(static_cast<Value>(widen(x[i])), static_cast<Value>(widen(dy[i])), mean);
  }
};

template <class Value>
NORMSCOPE_INLINE bool is_finite(Value value) {
  return value - value == 0;
}

// The lanes that a fold must look at where only the first n hold anything: the power of two from n on.
NORMSCOPE_INLINE std::int64_t lanes_to_fold(std::int64_t n) {
  std::int64_t lanes = 1;
  while (lanes < n && lanes < kMaxLanes) lanes *= 2;
  return lanes;
}

// Adds the upper half of the lanes to the lower, and so on. Lanes left out because they are zero would
// change nothing.
template <class Real>
NORMSCOPE_INLINE Real fold(Real (&lanes)[kMaxLanes], std::int64_t count) {
  std::int64_t half = count / 2;
  for (; half >= kLanesOf<Real>; half /= 2) {
    for (std::int64_t i = 0; i < half; i += kLanesOf<Real>) {
      store(lanes + i, load(lanes + i) + load(lanes + i + half));
    }
  }
  for (; half >= 1; half /= 2) {
    for (std::int64_t i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
  }
  return lanes[0];
}

// The mean of some of the tile's elements, `stride` elements of memory apart: computed in Real, rounded
// to Pivot.
template <class Real, class Pivot, class Element>
NORMSCOPE_INLINE Pivot tile_pivot(Layout layout, const Element* x, std::int64_t stride,
                                  std::int64_t n) {
  const PivotSamples samples = pivot_samples(layout, n);
  alignas(kVectorBytes) Real lanes[kMaxLanes] = {};
  for (std::int64_t j = 0; j < samples.count; ++j) {
    lanes[j] = static_cast<Real>(widen(x[j * samples.stride * stride]));
  }
  return static_cast<Pivot>(fold(lanes, lanes_to_fold(samples.count)) / static_cast<Real>(samples.count));
}

// The sums again, in float64: where float32 has overflowed, or shows what is not finite.
template <class AnyTerms>
[[gnu::noinline]] Terms<double> sums_in_float64(Layout layout, const AnyTerms& terms,
                                                std::int64_t stride, std::int64_t n,
                                                double center) {
  double first[kMaxLanes] = {};
  double second[kMaxLanes] = {};
  for (std::int64_t i = 0; i < n; ++i) {
    const Terms<double> term = terms.scalar_at(i * stride, center);
    first[lane_of(layout, i)] += term.first;
    second[lane_of(layout, i)] += term.second;
  }
  const std::int64_t lanes = tile_shape(layout).lanes;
  return {fold(first, lanes), fold(second, lanes)};
}

// Sums n neighbouring elements: lane l takes l, l + 64, ...
template <class AnyTerms, class Real = typename AnyTerms::Real>
NORMSCOPE_INLINE Terms<Real> sums_of_neighbours(const AnyTerms& terms, std::int64_t n,
                                                Real center) {
  // As many lanes at a time as leave room in 16 vector registers.
  constexpr int kWidth = kLanesOf<Real>;
  constexpr int kVectors = 4;
  constexpr std::int64_t kLanes = kChannelsFirstTile.lanes;
  const Vector<Real> centers = broadcast(center);
  const std::int64_t rows = n / kLanes;
  const std::int64_t rest = n % kLanes;
  const std::int64_t used = lanes_to_fold(n);
  alignas(kVectorBytes) Real first_lanes[kMaxLanes];
  alignas(kVectorBytes) Real second_lanes[kMaxLanes];
  for (std::int64_t lane = 0; lane < used; lane += kVectors * kWidth) {
    Vector<Real> first[kVectors] = {};
    Vector<Real> second[kVectors] = {};
    for (std::int64_t row = 0; row < rows; ++row) {
      for (int v = 0; v < kVectors; ++v) {
        const auto term = terms.load_at(row * kLanes + lane + v * kWidth, centers);
        first[v] += term.first;
        second[v] += term.second;
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t begin = lane + v * kWidth;
      if (begin + kWidth <= rest) {
        const auto term = terms.load_at(rows * kLanes + begin, centers);
        first[v] += term.first;
        second[v] += term.second;
      }
      store(first_lanes + begin, first[v]);
      store(second_lanes + begin, second[v]);
    }
  }
  for (std::int64_t l = rest / kWidth * kWidth; l < rest; ++l) {
    const Terms<Real> term = terms.scalar_at(rows * kLanes + l, center);
    first_lanes[l] += term.first;
    second_lanes[l] += term.second;
  }
  return {fold(first_lanes, used), fold(second_lanes, used)};
}

// Sums kVectors vectors of channels over n rows, `row_stride` elements apart: lane l takes the rows 32 l
// ... 32 l + 31. center, first, second [kVectors * width].
template <int kVectors, class AnyTerms, class Real = typename AnyTerms::Real>
NORMSCOPE_INLINE void sums_of_rows(const AnyTerms& terms, std::int64_t row_stride, std::int64_t n,
                                   const Real* center, Real* first, Real* second) {
  constexpr int kWidth = kLanesOf<Real>;
  constexpr std::int64_t kLanes = kChannelsLastTile.lanes;
  constexpr std::int64_t kChain = kChannelsLastTile.chain;
  Vector<Real> lane_first[kLanes][kVectors] = {};
  Vector<Real> lane_second[kLanes][kVectors] = {};
  for (std::int64_t lane = 0; lane * kChain < n; ++lane) {
    const std::int64_t end = n < (lane + 1) * kChain ? n : (lane + 1) * kChain;
    Vector<Real> centers[kVectors];
    Vector<Real> chain_first[kVectors] = {};
    Vector<Real> chain_second[kVectors] = {};
    for (int v = 0; v < kVectors; ++v) centers[v] = load(center + v * kWidth);
    for (std::int64_t row = lane * kChain; row < end; ++row) {
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
    store(first + v * kWidth, (lane_first[0][v] + lane_first[2][v]) +
                                  (lane_first[1][v] + lane_first[3][v]));
    store(second + v * kWidth, (lane_second[0][v] + lane_second[2][v]) +
                                   (lane_second[1][v] + lane_second[3][v]));
  }
}
