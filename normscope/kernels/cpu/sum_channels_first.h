// SPDX-License-Identifier: Apache-2.0
//
// Sums of tensors whose positions are neighbours in memory. Included once by each target (vector.h
// says why).

// The moments of a tile whose elements all have lanes of their own.
template <class Element, class Real = Arithmetic<Element>>
NORMSCOPE_INLINE Terms<Real> moments_of_few_neighbours(const Element* x, std::int64_t n,
                                                       Real& pivot) {
  constexpr int kWidth = kLanesOf<Real>;
  const Lanes<Real> lanes = load_lanes(x, n);
  pivot = fold(lanes) / static_cast<Real>(n);
  const Vector<Real> pivots = broadcast(pivot);
  Lanes<Real> first;
  Lanes<Real> second;
#pragma GCC unroll 16
  for (int v = 0; v < kLaneVectors<Real>; ++v) {
    const std::int64_t rest = n - v * kWidth;
    const auto term = MomentTerms<Element>::of(lanes.vectors[v], pivots, pivots);
    if (rest >= kWidth) {
      first.vectors[v] = term.first;
      second.vectors[v] = term.second;
    } else if (rest > 0) {
      first.vectors[v] = first_elements<Real>(term.first, rest);
      second.vectors[v] = first_elements<Real>(term.second, rest);
    } else {
      first.vectors[v] = Vector<Real>{};
      second.vectors[v] = Vector<Real>{};
    }
  }
  return {fold(first), fold(second)};
}

template <class Element>
NORMSCOPE_INLINE void moments_of_neighbours(const Element* x, std::int64_t n, TileBatch& batch,
                                            std::int64_t slot) {
  using Real = Arithmetic<Element>;
  const MomentTerms<Element> terms{x};
  Real pivot;
  Terms<Real> sums;
  if (n <= kMaxLanes) {
    sums = moments_of_few_neighbours(x, n, pivot);
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
  const std::int64_t per_sample = tiles_per_sample(Layout::kChannelsFirst, x.positions);
  TileBatch batch;
  for (std::int64_t index = tiles.begin; index < tiles.end; ++index) {
    const Tile tile = tile_at(index, x.positions, kChannelsFirstTile, per_sample);
    for (std::int64_t c = 0; c < x.channels; c += kBatchChannels) {
      const std::int64_t end = smaller(c + kBatchChannels, x.channels);
      for (std::int64_t i = c; i < end; ++i) {
        moments_of_neighbours(element_at<Element>(x, tile.sample, i, tile.begin), tile.size, batch,
                              i - c);
      }
      add_moment_tiles(batch, tile.size, limbs.channel_range(c, end));
    }
  }
  canonicalize_limbs(limbs);
}

// The gradient sums of a tile whose elements all have lanes of their own.
template <class Element, class Real = Arithmetic<Element>>
NORMSCOPE_INLINE Terms<Real> gradient_sums_of_few_neighbours(const Element* x, const Element* dy,
                                                             std::int64_t n, Real mean_hi) {
  const Lanes<Real> x_lanes = load_lanes(x, n);
  const Lanes<Real> dy_lanes = load_lanes(dy, n);
  Lanes<Real> second;
#pragma GCC unroll 16
  for (int v = 0; v < kLaneVectors<Real>; ++v) {  // where dy is zero, so is its term
    second.vectors[v] =
        GradientTerms<Element>::of(x_lanes.vectors[v], dy_lanes.vectors[v], broadcast(mean_hi))
            .second;
  }
  return {fold(dy_lanes), fold(second)};
}

template <class Element>
NORMSCOPE_INLINE void gradient_sums_of_neighbours(const Element* x, const Element* dy,
                                                  std::int64_t n, Arithmetic<Element> mean_hi,
                                                  TileBatch& batch, std::int64_t slot) {
  using Real = Arithmetic<Element>;
  const GradientTerms<Element> terms{x, dy};
  const Terms<Real> sums = n <= kMaxLanes ? gradient_sums_of_few_neighbours(x, dy, n, mean_hi)
                                          : sums_of_neighbours(terms, n, mean_hi);
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
  const std::int64_t per_sample = tiles_per_sample(Layout::kChannelsFirst, x.positions);
  TileBatch batch;
  for (std::int64_t index = tiles.begin; index < tiles.end; ++index) {
    const Tile tile = tile_at(index, x.positions, kChannelsFirstTile, per_sample);
    for (std::int64_t c = 0; c < x.channels; c += kBatchChannels) {
      const std::int64_t end = smaller(c + kBatchChannels, x.channels);
      for (std::int64_t i = c; i < end; ++i) {
        gradient_sums_of_neighbours(element_at<Element>(x, tile.sample, i, tile.begin),
                                    element_at<Element>(dy, tile.sample, i, tile.begin), tile.size,
                                    mean_hi[i], batch, i - c);
      }
      add_gradient_tiles(batch, limbs.channel_range(c, end));
    }
  }
  canonicalize_limbs(limbs);
}
