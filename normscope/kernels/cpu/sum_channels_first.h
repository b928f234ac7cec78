// SPDX-License-Identifier: Apache-2.0
//
// Sums tensors with contiguous positions. Included once by each target (vector.h says why).
//
// Sums as many channels at a time as a vector has elements, and folds their lanes together.
// run_of(i) is the run of channel i of these; for larger i it is that of the last channel.

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

// Short tiles: at most kMaxLanes elements, one per lane.

// The lanes of a vector's width of channels, folded once.
template <class Real>
struct HalvedLanes {
  static constexpr int kHalf = kLaneVectors<Real> / 2;
  Vector<Real> vectors[kHalf][kLanesOf<Real>];

  // Folds the lanes of each channel to one number.
  NORMSCOPE_INLINE Vector<Real> fold() {
    for (int half = kHalf / 2; half >= 1; half /= 2) {
      for (int v = 0; v < half; ++v) {
        for (int i = 0; i < kLanesOf<Real>; ++i) vectors[v][i] += vectors[v + half][i];
      }
    }
    return fold_across<Real>(vectors[0]);
  }
};

// Calls set(v, i, value) for every vector v of HalvedLanes and every channel i. The value is the
// sum of the vectors v and v + kHalf of the channel's n lanes: full(i, w) for a full vector,
// rest(i, w, valid) for a partial one, and zero for none. The number of lanes is tested once for
// all channels.
template <class Real, class Full, class Rest, class Set>
NORMSCOPE_INLINE void halve_lanes(std::int64_t n, const Full& full, const Rest& rest,
                                  const Set& set) {
  constexpr int kWidth = kLanesOf<Real>;
  constexpr int kHalf = HalvedLanes<Real>::kHalf;
  for (int v = 0; v < kHalf; ++v) {
    const std::int64_t low = n - v * kWidth;
    const std::int64_t high = low - kHalf * kWidth;
    if (high >= kWidth) {
      for (int i = 0; i < kWidth; ++i) set(v, i, full(i, v) + full(i, v + kHalf));
    } else if (high > 0) {
      for (int i = 0; i < kWidth; ++i) set(v, i, full(i, v) + rest(i, v + kHalf, high));
    } else if (low >= kWidth) {
      for (int i = 0; i < kWidth; ++i) set(v, i, full(i, v));
    } else if (low > 0) {
      for (int i = 0; i < kWidth; ++i) set(v, i, rest(i, v, low));
    } else {
      for (int i = 0; i < kWidth; ++i) set(v, i, decltype(full(i, v)){});
    }
  }
}

// Loads the `valid` elements of vector v, fewer than a full vector. The other elements are
// unspecified.
template <class Element>
NORMSCOPE_INLINE auto load_rest(const Element* from, int v, std::int64_t valid) {
  return v == 0 ? load_few(from, valid) : load_partial(from, valid);
}

template <class RunOf>
NORMSCOPE_INLINE auto pivots_of_short_tiles(const RunOf& run_of, std::int64_t n) {
  using Real = typename decltype(run_of(0))::Real;
  constexpr int kWidth = kLanesOf<Real>;
  HalvedLanes<Real> lanes;
  halve_lanes<Real>(
      n, [&](int i, int v) { return load(run_of(i).x + v * kWidth); },
      [&](int i, int v, std::int64_t valid) {
        return first_elements<Real>(load_rest(run_of(i).x + v * kWidth, v, valid), valid);
      },
      [&](int v, int i, Vector<Real> value) { lanes.vectors[v][i] = value; });
  return lanes.fold() / broadcast(static_cast<Real>(n));
}

template <class RunOf, class Real>
NORMSCOPE_INLINE auto sums_of_short_tiles(const RunOf& run_of, std::int64_t n,
                                          const Real* centers) {
  using Sums = Terms<Vector<Real>>;
  constexpr int kWidth = kLanesOf<Real>;
  HalvedLanes<Real> first;
  HalvedLanes<Real> second;
  halve_lanes<Real>(
      n,
      [&](int i, int v) {
        return run_of(i).at(0, v * kWidth).terms(kLoadVector, broadcast(centers[i]));
      },
      [&](int i, int v, std::int64_t valid) {
        const auto load = [&](const auto* from) { return load_rest(from, v, valid); };
        const auto terms = run_of(i).at(0, v * kWidth).terms(load, broadcast(centers[i]));
        return Sums{first_elements<Real>(terms.first, valid),
                    first_elements<Real>(terms.second, valid)};
      },
      [&](int v, int i, const Sums& terms) {
        first.vectors[v][i] = terms.first;
        second.vectors[v][i] = terms.second;
      });
  return Sums{first.fold(), second.fold()};
}

// Long tiles: more elements than lanes. Only the first `count` channels are summed.

// The lanes of a vector's width of channels, folded to one vector per channel, or to two if the
// lanes are in the order of interleaved blocks.
template <class Element>
struct FoldedLanes {
  using Real = Arithmetic<Element>;
  static constexpr int kVectors = kBlockIsInterleaved<Element> ? 2 : 1;
  Vector<Real> vectors[kVectors][kLanesOf<Real>];

  NORMSCOPE_INLINE void set(int i, Vector<Real> (&lanes)[kLaneVectors<Real>]) {
    fold_halves<kVectors>(lanes);
    for (int v = 0; v < kVectors; ++v) vectors[v][i] = lanes[v];
  }

  // Folds the lanes of each channel to one number.
  NORMSCOPE_INLINE Vector<Real> fold() const {
    if constexpr (kVectors == 1) return fold_across<Real>(vectors[0]);
    return fold_across<Real>(vectors[0]) + fold_across<Real>(vectors[kVectors - 1]);
  }
};

template <class Element, std::size_t... kIndices>
NORMSCOPE_INLINE auto gather(const Element* x, std::int64_t stride,
                             std::index_sequence<kIndices...>) {
  using Real = Arithmetic<Element>;
  return Vector<Real>{widen(x[static_cast<std::int64_t>(kIndices) * stride])...};
}

// Loads one element per lane, `stride` apart, and folds the lanes to one vector.
template <class Element, class Real = Arithmetic<Element>>
NORMSCOPE_INLINE Vector<Real> fold_elements(const Element* x, std::int64_t stride) {
  constexpr int kWidth = kLanesOf<Real>;
  Vector<Real> lanes[kLaneVectors<Real>];
#pragma GCC unroll 1  // otherwise GCC 12 keeps 64 addresses in memory
  for (int v = 0; v < kLaneVectors<Real>; ++v) {
    lanes[v] = gather(x, stride, std::make_index_sequence<kWidth>{});
    x += kWidth * stride;
  }
  fold_halves<1>(lanes);
  return lanes[0];
}

template <class RunOf>
NORMSCOPE_INLINE auto pivots_of_long_tiles(const RunOf& run_of, std::int64_t n, int count) {
  using Real = typename decltype(run_of(0))::Real;
  const PivotSamples samples = pivot_samples(Layout::kChannelsFirst, n);
  Vector<Real> lanes[kLanesOf<Real>];
  for (int i = 0; i < kLanesOf<Real>; ++i) {
    lanes[i] = i < count ? fold_elements(run_of(i).x, samples.stride) : Vector<Real>{};
  }
  return fold_across<Real>(lanes) / broadcast(static_cast<Real>(samples.count));
}

// Sums n contiguous elements, at least one per lane, into channel i of `first` and `second`: lane l
// takes the elements l, l + 64, ...
template <class Run, class Element = typename Run::ElementType, class Real = typename Run::Real>
NORMSCOPE_INLINE void sum_neighbours(const Run& run, std::int64_t n, Real center,
                                     FetchAhead<Run> fetch_ahead, int i,
                                     FoldedLanes<Element>& first, FoldedLanes<Element>& second) {
  // As many vectors at a time as 16 registers have room for.
  constexpr int kVectors = 4;
  constexpr int kBlocks = kVectors / kBlockVectors<Element>;
  constexpr std::int64_t kBlockElements = kBlockVectors<Element> * kLanesOf<Real>;
  constexpr std::int64_t kLanes = kChannelsFirstTile.lanes;
  const Vector<Real> centers = broadcast(center);
  const std::int64_t rows = n / kLanes;
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
        run.at(0, row * kLanes + first_lane + b * kBlockElements)
            .for_block(kLoadBlock, centers, [&](int v, const Terms<Vector<Real>>& term) {
              chain_first[b * kBlockVectors<Element> + v] += term.first;
              chain_second[b * kBlockVectors<Element> + v] += term.second;
            });
      }
    }
    for (int b = 0; b < kBlocks; ++b) {
      const std::int64_t at = rows * kLanes + first_lane + b * kBlockElements;
      if (at >= n) break;
      const std::int64_t count = smaller(n - at, kBlockElements);
      const auto load_rest = [&](const Element* from) { return load_partial_block(from, count); };
      run.at(0, at).for_block(load_rest, centers, [&](int v, const Terms<Vector<Real>>& term) {
        const std::int64_t valid = count_in_vector<Element>(count, v);
        chain_first[b * kBlockVectors<Element> + v] += first_elements<Real>(term.first, valid);
        chain_second[b * kBlockVectors<Element> + v] += first_elements<Real>(term.second, valid);
      });
    }
    for (int v = 0; v < kVectors; ++v) {
      lane_first[begin + v] = chain_first[v];
      lane_second[begin + v] = chain_second[v];
    }
  }
  fetch_ahead(n % kLanes);
  first.set(i, lane_first);
  second.set(i, lane_second);
}

// next_of(i) is prefetched while channel i is summed.
template <class RunOf, class NextOf, class Real>
NORMSCOPE_INLINE auto sums_of_long_tiles(const RunOf& run_of, const NextOf& next_of, std::int64_t n,
                                         int count, const Real* centers) {
  using Run = decltype(run_of(0));
  FoldedLanes<typename Run::ElementType> first;
  FoldedLanes<typename Run::ElementType> second;
  for (int i = 0; i < count; ++i) {
    sum_neighbours(run_of(i), n, centers[i], FetchAhead<Run>(next_of(i), n), i, first, second);
  }
  for (int i = count; i < kLanesOf<Real>; ++i) {
    Vector<Real> none[kLaneVectors<Real>] = {};
    first.set(i, none);
    second.set(i, none);
  }
  return Terms<Vector<Real>>{first.fold(), second.fold()};
}

template <class AnyTerms>
void add_sums_channels_first(const AnyTerms& terms, TileRange tiles, LimbsView limbs) {
  using Real = typename AnyTerms::Run::Real;
  constexpr int kWidth = kLanesOf<Real>;
  const auto sum = [&](const TileChannels& block, const TileChannels& next_block,
                       TileBatch<Real>& batch) {
    const std::int64_t n = block.tile.size;
    for (std::int64_t c = block.begin; c < block.end; c += kWidth) {
      const auto run_of = [&](std::int64_t i) {
        return terms.run(block.tile.sample, smaller(c + i, block.end - 1), block.tile.begin);
      };
      const TileChannels next =
          c + kWidth < block.end ? TileChannels{block.tile, c + kWidth, block.end} : next_block;
      const auto next_of = [&](std::int64_t i) {
        return terms.run(next.tile.sample, smaller(next.begin + i, next.end - 1), next.tile.begin);
      };
      const std::int64_t slot = c - block.begin;
      Real* const centers = batch.center + slot;
      if (n <= kMaxLanes) {
        if constexpr (AnyTerms::kHasPivot) store_bytes(centers, pivots_of_short_tiles(run_of, n));
        batch.set_sums(slot, sums_of_short_tiles(run_of, n, centers));
      } else {
        const auto count = static_cast<int>(smaller(kWidth, block.end - c));
        if constexpr (AnyTerms::kHasPivot) {
          store_bytes(centers, pivots_of_long_tiles(run_of, n, count));
        }
        batch.set_sums(slot, sums_of_long_tiles(run_of, next_of, n, count, centers));
      }
    }
  };
  add_tiles<Real>(terms, Layout::kChannelsFirst, tiles, limbs, sum);
}
