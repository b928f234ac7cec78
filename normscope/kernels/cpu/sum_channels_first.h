// SPDX-License-Identifier: Apache-2.0
//
// Sums of tensors whose positions are neighbours in memory. Included once by each target (vector.h
// says why).
//
// As many channels at a time as a vector has elements, so that their lanes are folded together. In
// what follows terms_of(i) are those of the i-th.

// Short tiles: at most kMaxLanes elements, each of which has a lane of its own.

// Vector v of the terms of n elements; zero in the lanes beyond. At least one is to be had.
template <class Element>
NORMSCOPE_INLINE auto terms_of_lanes(const MomentTerms<Element>& terms, std::int64_t v,
                                     std::int64_t n, Arithmetic<Element> pivot) {
  using Real = Arithmetic<Element>;
  const Vector<Real> pivots = broadcast(pivot);
  const auto term = MomentTerms<Element>::of(load_vector_of_lanes(terms.x, v, n), pivots, pivots);
  const std::int64_t valid = n - v * kLanesOf<Real>;
  if (valid >= kLanesOf<Real>) return term;
  return Terms<Vector<Real>>{first_elements<Real>(term.first, valid),
                             first_elements<Real>(term.second, valid)};
}

// Where dy is zero, so is its term.
template <class Element>
NORMSCOPE_INLINE auto terms_of_lanes(const GradientTerms<Element>& terms, std::int64_t v,
                                     std::int64_t n, Arithmetic<Element> mean_hi) {
  return GradientTerms<Element>::of(load_vector_of_lanes(terms.x, v, n),
                                    load_vector_of_lanes(terms.dy, v, n), broadcast(mean_hi));
}

// Lanes that have been folded once, of a vector's width of channels.
template <class Real>
struct HalvedLanes {
  static constexpr int kWidth = kLanesOf<Real>;
  static constexpr int kHalf = kLaneVectors<Real> / 2;
  Vector<Real> vectors[kHalf][kWidth];

  NORMSCOPE_INLINE Vector<Real> fold() {
    for (int half = kHalf / 2; half >= 1; half /= 2) {
      for (int v = 0; v < half; ++v) {
        for (int i = 0; i < kWidth; ++i) vectors[v][i] += vectors[v + half][i];
      }
    }
    return fold_across<Real>(vectors[0]);
  }
};

// Calls set(v, i, at) for every vector v of HalvedLanes and every channel i. The vector is the sum
// of at(w) for one or two w, or zero where there is none; how many of them hold n elements, and
// whether they hold `full` vectors, is looked at once for all channels.
template <class Real, class Full, class Partial, class Set>
NORMSCOPE_INLINE void halve_lanes(std::int64_t n, const Full& full, const Partial& partial,
                                  const Set& set) {
  constexpr int kWidth = kLanesOf<Real>;
  constexpr int kHalf = HalvedLanes<Real>::kHalf;
  for (int v = 0; v < kHalf; ++v) {
    const std::int64_t low = n - v * kWidth;
    const std::int64_t high = low - kHalf * kWidth;
    if (high >= kWidth) {
      for (int i = 0; i < kWidth; ++i) set(v, i, full(i, v) + full(i, v + kHalf));
    } else if (high > 0) {
      for (int i = 0; i < kWidth; ++i) set(v, i, full(i, v) + partial(i, v + kHalf));
    } else if (low >= kWidth) {
      for (int i = 0; i < kWidth; ++i) set(v, i, full(i, v));
    } else if (low > 0) {
      for (int i = 0; i < kWidth; ++i) set(v, i, partial(i, v));
    } else {
      for (int i = 0; i < kWidth; ++i) set(v, i, decltype(full(i, v)){});
    }
  }
}

template <class Element, class TermsOf>
NORMSCOPE_INLINE auto pivots_of_short_tiles(const TermsOf& terms_of, std::int64_t n) {
  using Real = Arithmetic<Element>;
  HalvedLanes<Real> lanes;
  halve_lanes<Real>(
      n, [&](int i, int v) { return load(terms_of(i).x + v * kLanesOf<Real>); },
      [&](int i, int v) { return load_vector_of_lanes(terms_of(i).x, v, n); },
      [&](int v, int i, Vector<Real> value) { lanes.vectors[v][i] = value; });
  return lanes.fold() / broadcast(static_cast<Real>(n));
}

// center_of(i) is what the i-th channel's sums are about.
template <class Element, class TermsOf, class CenterOf, class Real = Arithmetic<Element>>
NORMSCOPE_INLINE void put_sums_of_short_tiles(const TermsOf& terms_of, std::int64_t n,
                                              const CenterOf& center_of, TileBatch& batch,
                                              std::int64_t slot) {
  HalvedLanes<Real> first;
  HalvedLanes<Real> second;
  halve_lanes<Real>(
      n,
      [&](int i, int v) {
        return terms_of(i).load_at(v * kLanesOf<Real>, broadcast(center_of(i)));
      },
      [&](int i, int v) { return terms_of_lanes(terms_of(i), v, n, center_of(i)); },
      [&](int v, int i, const Terms<Vector<Real>>& terms) {
        first.vectors[v][i] = terms.first;
        second.vectors[v][i] = terms.second;
      });
  put_sums(first.fold(), second.fold(), batch, slot);
}

// Long tiles: more elements than lanes. Only the first `count` channels are looked at. next_of(i)
// is fetched while the i-th is summed.

template <class Element, class TermsOf>
NORMSCOPE_INLINE auto pivots_of_long_tiles(const TermsOf& terms_of, std::int64_t n, int count) {
  using Real = Arithmetic<Element>;
  const PivotSamples samples = pivot_samples(Layout::kChannelsFirst, n);
  Vector<Real> lanes[kLanesOf<Real>];
  for (int i = 0; i < kLanesOf<Real>; ++i) {
    lanes[i] = i < count ? fold_elements(terms_of(i).x, samples.stride) : Vector<Real>{};
  }
  return fold_across<Real>(lanes) / broadcast(static_cast<Real>(samples.count));
}

template <class Element, class TermsOf, class NextOf, class CenterOf>
NORMSCOPE_INLINE void put_sums_of_long_tiles(const TermsOf& terms_of, const NextOf& next_of,
                                             std::int64_t n, const CenterOf& center_of, int count,
                                             TileBatch& batch, std::int64_t slot) {
  using Real = Arithmetic<Element>;
  FoldedLanes<Element> first;
  FoldedLanes<Element> second;
  for (int i = 0; i < count; ++i) {
    const FetchAhead fetch_ahead(next_of(i), 0, n);
    sum_neighbours(terms_of(i), n, center_of(i), fetch_ahead, i, first, second);
  }
  for (int i = count; i < kLanesOf<Real>; ++i) {
    for (int v = 0; v < FoldedLanes<Element>::kVectors; ++v) {
      first.vectors[v][i] = Vector<Real>{};
      second.vectors[v][i] = Vector<Real>{};
    }
  }
  put_sums(first.fold(), second.fold(), batch, slot);
}

// Tiles of any size.

template <class Element, class TermsOf>
NORMSCOPE_INLINE auto pivots_of_tiles(const TermsOf& terms_of, std::int64_t n, int count) {
  if (n <= kMaxLanes) return pivots_of_short_tiles<Element>(terms_of, n);
  return pivots_of_long_tiles<Element>(terms_of, n, count);
}

template <class Element, class TermsOf, class NextOf, class CenterOf>
NORMSCOPE_INLINE void put_sums_of_tiles(const TermsOf& terms_of, const NextOf& next_of,
                                        std::int64_t n, const CenterOf& center_of, int count,
                                        TileBatch& batch, std::int64_t slot) {
  if (n <= kMaxLanes) {
    put_sums_of_short_tiles<Element>(terms_of, n, center_of, batch, slot);
  } else {
    put_sums_of_long_tiles<Element>(terms_of, next_of, n, center_of, count, batch, slot);
  }
}

// Calls put(terms_of, next_of, channel, tile, count, batch, slot) for every tile and `count`
// channels at a time, at most a vector's width: channel(i) is the i-th of them, or the last one for
// an i beyond, and next_of(i) what is summed so many channels later. Then finish(block, batch) for
// the channels of the batch, whose room beyond them may be written to as well.
template <class Element, class TermsAt, class Put, class Finish>
NORMSCOPE_INLINE void for_tiles_channels_first(const TensorView& x, TileRange tiles,
                                               const TermsAt& terms_at, const Put& put,
                                               const Finish& finish) {
  constexpr int kWidth = kLanesOf<Arithmetic<Element>>;
  TileBatch batch;
  const auto sum = [&](const TileChannels& block, const TileChannels& next_block) {
    for (std::int64_t c = block.begin; c < block.end; c += kWidth) {
      const auto channel = [&](std::int64_t i) { return smaller(c + i, block.end - 1); };
      const auto terms_of = [&](std::int64_t i) { return terms_at(block.tile, channel(i)); };
      const bool is_last = c + kWidth >= block.end;
      const TileChannels next =
          is_last ? next_block : TileChannels{block.tile, c + kWidth, block.end};
      const auto next_of = [&](std::int64_t i) {
        return terms_at(next.tile, smaller(next.begin + i, next.end - 1));
      };
      const auto count = static_cast<int>(smaller(kWidth, block.end - c));
      put(terms_of, next_of, channel, block.tile, count, batch, c - block.begin);
    }
    finish(block, batch);
  };
  for_blocks(x, Layout::kChannelsFirst, tiles, sum);
}

template <class Element>
void add_moments_channels_first(const TensorView& x, TileRange tiles, LimbsView limbs) {
  using Real = Arithmetic<Element>;
  const auto terms_at = [&](const Tile& tile, std::int64_t c) {
    return MomentTerms<Element>{element_at<Element>(x, tile.sample, c, tile.begin)};
  };
  const auto put = [&](const auto& terms_of, const auto& next_of, const auto& /*channel*/,
                       const Tile& tile, int count, TileBatch& batch, std::int64_t slot) {
    const auto pivots = pivots_of_tiles<Element>(terms_of, tile.size, count);
    store_wide(batch.pivot + slot, pivots);
    alignas(kVectorBytes) Real centers[kLanesOf<Real>];
    store(centers, pivots);
    const auto pivot_of = [&](std::int64_t i) { return centers[i]; };
    put_sums_of_tiles<Element>(terms_of, next_of, tile.size, pivot_of, count, batch, slot);
  };
  const auto finish = [&](const TileChannels& block, TileBatch& batch) {
    const Tile& tile = block.tile;
    for_overflown<Element>(batch, block.end - block.begin, [&](std::int64_t i) {
      const MomentTerms<Element> terms = terms_at(tile, block.begin + i);
      put_moments_in_float64(Layout::kChannelsFirst, terms, 1, tile.size, batch, i);
    });
    add_moment_tiles<Element>(batch, tile.size, limbs.channel_range(block.begin, block.end));
  };
  for_tiles_channels_first<Element>(x, tiles, terms_at, put, finish);
  canonicalize_limbs(limbs);
}

template <class Element>
void add_gradient_sums_channels_first(const TensorView& x, const TensorView& dy,
                                      const Arithmetic<Element>* mean_hi, TileRange tiles,
                                      LimbsView limbs) {
  const auto terms_at = [&](const Tile& tile, std::int64_t c) {
    return GradientTerms<Element>{element_at<Element>(x, tile.sample, c, tile.begin),
                                  element_at<Element>(dy, tile.sample, c, tile.begin)};
  };
  const auto put = [&](const auto& terms_of, const auto& next_of, const auto& channel,
                       const Tile& tile, int count, TileBatch& batch, std::int64_t slot) {
    const auto mean_of = [&](std::int64_t i) { return mean_hi[channel(i)]; };
    put_sums_of_tiles<Element>(terms_of, next_of, tile.size, mean_of, count, batch, slot);
  };
  const auto finish = [&](const TileChannels& block, TileBatch& batch) {
    for_overflown<Element>(batch, block.end - block.begin, [&](std::int64_t i) {
      const std::int64_t c = block.begin + i;
      put_sums_in_float64(Layout::kChannelsFirst, terms_at(block.tile, c), 1, block.tile.size,
                          static_cast<double>(mean_hi[c]), batch, i);
    });
    add_gradient_tiles(batch, limbs.channel_range(block.begin, block.end));
  };
  for_tiles_channels_first<Element>(x, tiles, terms_at, put, finish);
  canonicalize_limbs(limbs);
}
