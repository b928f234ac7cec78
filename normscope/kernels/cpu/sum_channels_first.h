// SPDX-License-Identifier: Apache-2.0
//
// Sums of tensors whose positions are neighbours in memory. Included once by each target (vector.h
// says why).

// Tiles of at most kMaxLanes elements, each of which has a lane of its own.

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

// The terms of n elements; zero in the lanes beyond.
template <class AnyTerms, class Real = typename AnyTerms::Real>
NORMSCOPE_INLINE Terms<Lanes<Real>> terms_of_few(const AnyTerms& terms, std::int64_t n,
                                                 Real center) {
  Terms<Lanes<Real>> result;
#pragma GCC unroll 16
  for (int v = 0; v < kLaneVectors<Real>; ++v) {
    Terms<Vector<Real>> term{};
    if (v * kLanesOf<Real> < n) term = terms_of_lanes(terms, v, n, center);
    result.first.vectors[v] = term.first;
    result.second.vectors[v] = term.second;
  }
  return result;
}

template <class AnyTerms, class Real = typename AnyTerms::Real>
NORMSCOPE_INLINE Terms<Real> sums_of_few(const AnyTerms& terms, std::int64_t n, Real center) {
  const Terms<Lanes<Real>> lanes = terms_of_few(terms, n, center);
  return {fold(lanes.first), fold(lanes.second)};
}

template <class Element>
NORMSCOPE_INLINE auto pivot_of_few(const Element* x, std::int64_t n) {
  using Real = Arithmetic<Element>;
  return fold(load_lanes(x, n)) / static_cast<Real>(n);
}

// As many channels at a time as a vector has elements, so that their lanes are folded together.
// terms_of(i) are those of the i-th.

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
NORMSCOPE_INLINE auto pivots_of_channels(const TermsOf& terms_of, std::int64_t n) {
  using Real = Arithmetic<Element>;
  HalvedLanes<Real> lanes;
  halve_lanes<Real>(
      n, [&](int i, int v) { return load(terms_of(i).x + v * kLanesOf<Real>); },
      [&](int i, int v) { return load_vector_of_lanes(terms_of(i).x, v, n); },
      [&](int v, int i, Vector<Real> value) { lanes.vectors[v][i] = value; });
  return lanes.fold() / broadcast(static_cast<Real>(n));
}

// center [kLanesOf<Real>]. Whether all sums are finite.
template <class Element, class TermsOf, class Real = Arithmetic<Element>>
NORMSCOPE_INLINE bool put_sums_of_channels(const TermsOf& terms_of, std::int64_t n,
                                           const Real* center, TileBatch& batch,
                                           std::int64_t slot) {
  HalvedLanes<Real> first;
  HalvedLanes<Real> second;
  halve_lanes<Real>(
      n,
      [&](int i, int v) { return terms_of(i).load_at(v * kLanesOf<Real>, broadcast(center[i])); },
      [&](int i, int v) { return terms_of_lanes(terms_of(i), v, n, center[i]); },
      [&](int v, int i, const Terms<Vector<Real>>& terms) {
        first.vectors[v][i] = terms.first;
        second.vectors[v][i] = terms.second;
      });
  alignas(kVectorBytes) Real sums[2][kLanesOf<Real>];
  store(sums[0], first.fold());
  store(sums[1], second.fold());
  return put_sums(sums[0], sums[1], kLanesOf<Real>, batch, slot);
}

// Calls together(i) for groups of a vector's width of the channels [begin, end) where tiles have
// few elements, and alone(i) for all others.
template <class Real, class Together, class Alone>
NORMSCOPE_INLINE void for_channels_of_tile(std::int64_t begin, std::int64_t end,
                                           std::int64_t tile_size, const Together& together,
                                           const Alone& alone) {
  std::int64_t i = begin;
  for (; tile_size <= kMaxLanes && i + kLanesOf<Real> <= end; i += kLanesOf<Real>) together(i);
  for (; i < end; ++i) alone(i);
}

template <class Element>
NORMSCOPE_INLINE void moments_of_neighbours(const Element* x, std::int64_t n, TileBatch& batch,
                                            std::int64_t slot) {
  using Real = Arithmetic<Element>;
  const MomentTerms<Element> terms{x};
  Real pivot;
  Terms<Real> sums;
  if (n <= kMaxLanes) {
    pivot = pivot_of_few(x, n);
    sums = sums_of_few(terms, n, pivot);
  } else {
    pivot = pivot_of_neighbours(x, n);
    sums = sums_of_neighbours(terms, n, pivot);
  }
  batch.pivot[slot] = static_cast<double>(pivot);
  batch.first[slot] = static_cast<double>(sums.first);
  batch.second[slot] = static_cast<double>(sums.second);
  if (sizeof(Real) < sizeof(double) && !(is_finite(sums.first) && is_finite(sums.second))) {
    batch.pivot[slot] = pivot_in_float64(Layout::kChannelsFirst, x, 1, n);
    const Terms<double> again =
        sums_in_float64(Layout::kChannelsFirst, terms, 1, n, batch.pivot[slot]);
    batch.first[slot] = again.first;
    batch.second[slot] = again.second;
  }
}

template <class Element>
void add_moments_channels_first(const TensorView& x, TileRange tiles, LimbsView limbs) {
  using Real = Arithmetic<Element>;
  const std::int64_t per_sample = tiles_per_sample(Layout::kChannelsFirst, x.positions);
  TileBatch batch;
  for (std::int64_t index = tiles.begin; index < tiles.end; ++index) {
    const Tile tile = tile_at(index, x.positions, kChannelsFirstTile, per_sample);
    for (std::int64_t c = 0; c < x.channels; c += kBatchChannels) {
      const std::int64_t end = smaller(c + kBatchChannels, x.channels);
      const auto terms_of = [&](std::int64_t i) {
        return MomentTerms<Element>{element_at<Element>(x, tile.sample, i, tile.begin)};
      };
      const auto alone = [&](std::int64_t i) {
        moments_of_neighbours(terms_of(i).x, tile.size, batch, i - c);
      };
      const auto together = [&](std::int64_t first) {
        const auto terms_from = [&](std::int64_t i) { return terms_of(first + i); };
        alignas(kVectorBytes) Real pivots[kLanesOf<Real>];
        store(pivots, pivots_of_channels<Element>(terms_from, tile.size));
        for (int i = 0; i < kLanesOf<Real>; ++i) {
          batch.pivot[first - c + i] = static_cast<double>(pivots[i]);
        }
        if (put_sums_of_channels<Element>(terms_from, tile.size, pivots, batch, first - c)) return;
        for (int i = 0; i < kLanesOf<Real>; ++i) alone(first + i);
      };
      for_channels_of_tile<Real>(c, end, tile.size, together, alone);
      add_moment_tiles(batch, tile.size, limbs.channel_range(c, end));
    }
  }
  canonicalize_limbs(limbs);
}

template <class Element>
NORMSCOPE_INLINE void gradient_sums_of_neighbours(const GradientTerms<Element>& terms,
                                                  std::int64_t n, Arithmetic<Element> mean_hi,
                                                  TileBatch& batch, std::int64_t slot) {
  using Real = Arithmetic<Element>;
  const Terms<Real> sums =
      n <= kMaxLanes ? sums_of_few(terms, n, mean_hi) : sums_of_neighbours(terms, n, mean_hi);
  batch.first[slot] = static_cast<double>(sums.first);
  batch.second[slot] = static_cast<double>(sums.second);
  if (sizeof(Real) < sizeof(double) && !(is_finite(sums.first) && is_finite(sums.second))) {
    const Terms<double> again =
        sums_in_float64(Layout::kChannelsFirst, terms, 1, n, static_cast<double>(mean_hi));
    batch.first[slot] = again.first;
    batch.second[slot] = again.second;
  }
}

template <class Element>
void add_gradient_sums_channels_first(const TensorView& x, const TensorView& dy,
                                      const Arithmetic<Element>* mean_hi, TileRange tiles,
                                      LimbsView limbs) {
  using Real = Arithmetic<Element>;
  const std::int64_t per_sample = tiles_per_sample(Layout::kChannelsFirst, x.positions);
  TileBatch batch;
  for (std::int64_t index = tiles.begin; index < tiles.end; ++index) {
    const Tile tile = tile_at(index, x.positions, kChannelsFirstTile, per_sample);
    for (std::int64_t c = 0; c < x.channels; c += kBatchChannels) {
      const std::int64_t end = smaller(c + kBatchChannels, x.channels);
      const auto terms_of = [&](std::int64_t i) {
        return GradientTerms<Element>{element_at<Element>(x, tile.sample, i, tile.begin),
                                      element_at<Element>(dy, tile.sample, i, tile.begin)};
      };
      const auto alone = [&](std::int64_t i) {
        gradient_sums_of_neighbours(terms_of(i), tile.size, mean_hi[i], batch, i - c);
      };
      const auto together = [&](std::int64_t first) {
        const auto terms_from = [&](std::int64_t i) { return terms_of(first + i); };
        if (put_sums_of_channels<Element>(terms_from, tile.size, mean_hi + first, batch,
                                          first - c)) {
          return;
        }
        for (int i = 0; i < kLanesOf<Real>; ++i) alone(first + i);
      };
      for_channels_of_tile<Real>(c, end, tile.size, together, alone);
      add_gradient_tiles(batch, limbs.channel_range(c, end));
    }
  }
  canonicalize_limbs(limbs);
}
