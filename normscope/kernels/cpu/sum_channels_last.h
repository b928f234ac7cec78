// SPDX-License-Identifier: Apache-2.0
//
// Sums of tensors whose channels are neighbours in memory. Included once by each target (vector.h
// says why).
//
// Blocks of channels fill four vectors, then one; what is left is copied into columns of a full
// vector's width.

// The tile's channels [begin, end), fewer than a vector, with zeros beside them.
template <class Element>
struct NarrowTile {
  static constexpr std::int64_t kWidth = kLanesOf<Arithmetic<Element>>;
  alignas(kVectorBytes) Element elements[kChannelsLastTile.positions * kWidth];

  NORMSCOPE_INLINE void copy(const Element* from, std::int64_t row_stride, std::int64_t rows,
                             std::int64_t channels) {
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t c = 0; c < kWidth; ++c) {
        elements[row * kWidth + c] = c < channels ? from[row * row_stride + c] : Element{};
      }
    }
  }
};

// Calls function.template operator()<vectors>(c, count) for blocks of channels from 0 to
// `channels`; count is below a vector's width for the last one at most.
template <class Real, class Function>
NORMSCOPE_INLINE void for_channel_blocks(std::int64_t channels, const Function& function) {
  constexpr std::int64_t kWidth = kLanesOf<Real>;
  std::int64_t c = 0;
  for (; c + 4 * kWidth <= channels; c += 4 * kWidth) {
    function.template operator()<4>(c, 4 * kWidth);
  }
  for (; c + kWidth <= channels; c += kWidth) function.template operator()<1>(c, kWidth);
  if (c < channels) function.template operator()<1>(c, channels - c);
}

// The pivots of `channels` channels, which fill vectors.
template <class Element>
NORMSCOPE_INLINE void pivots_of_rows(const Element* x, std::int64_t row_stride, std::int64_t rows,
                                     std::int64_t channels, Arithmetic<Element>* pivots) {
  using Real = Arithmetic<Element>;
  constexpr std::int64_t kSamples = kChannelsLastTile.pivot_samples;
  const PivotSamples samples = pivot_samples(Layout::kChannelsLast, rows);
  const auto count = broadcast(static_cast<Real>(samples.count));
  for (std::int64_t c = 0; c < channels; c += kLanesOf<Real>) {
    Vector<Real> lanes[kSamples];
    for (std::int64_t j = 0; j < kSamples; ++j) {
      lanes[j] = j < samples.count ? load(x + j * samples.stride * row_stride + c) : Vector<Real>{};
    }
    for (std::int64_t half = kSamples / 2; half >= 1; half /= 2) {
      for (std::int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    store(pivots + c, lanes[0] / count);
  }
}

// Room for the sums of a batch before they are widened. Whole vectors are set, as far as channels
// reach.
template <class Real>
struct BatchSums {
  alignas(kVectorBytes) Real center[kBatchChannels];
  alignas(kVectorBytes) Real first[kBatchChannels];
  alignas(kVectorBytes) Real second[kBatchChannels];
};

// Rows at `next` are fetched meanwhile, here and below.
template <class Element>
NORMSCOPE_INLINE void moments_of_rows(const Element* x, std::int64_t row_stride, std::int64_t rows,
                                      std::int64_t channels, const Element* next,
                                      TileBatch& batch) {
  using Real = Arithmetic<Element>;
  FetchAhead fetch_ahead(MomentTerms<Element>{next}, row_stride, channels);
  BatchSums<Real> sums;
  for_channel_blocks<Real>(channels, [&]<int kVectors>(std::int64_t c, std::int64_t count) {
    if (count >= kLanesOf<Real>) {
      pivots_of_rows(x + c, row_stride, rows, count, sums.center + c);
      sums_of_rows<kVectors>(MomentTerms<Element>{x + c}, row_stride, rows, sums.center + c,
                             fetch_ahead, sums.first + c, sums.second + c);
    } else {
      NarrowTile<Element> narrow;
      narrow.copy(x + c, row_stride, rows, count);
      pivots_of_rows(narrow.elements, narrow.kWidth, rows, narrow.kWidth, sums.center + c);
      sums_of_rows<1>(MomentTerms<Element>{narrow.elements}, narrow.kWidth, rows, sums.center + c,
                      fetch_ahead, sums.first + c, sums.second + c);
    }
  });
  for (std::int64_t c = 0; c < channels; c += kLanesOf<Real>) {
    store_wide(batch.pivot + c, load(sums.center + c));
    store_wide(batch.first + c, load(sums.first + c));
    store_wide(batch.second + c, load(sums.second + c));
  }
  for_overflown<Element>(batch, channels, [&](std::int64_t c) {
    put_moments_in_float64(Layout::kChannelsLast, MomentTerms<Element>{x + c}, row_stride, rows,
                           batch, c);
  });
}

template <class Element>
void add_moments_channels_last(const TensorView& x, TileRange tiles, LimbsView limbs) {
  const auto begin_of = [&](const TileChannels& block) {
    return element_at<Element>(x, block.tile.sample, block.begin, block.tile.begin);
  };
  TileBatch batch;
  for_blocks(x, Layout::kChannelsLast, tiles,
             [&](const TileChannels& block, const TileChannels& next) {
               moments_of_rows(begin_of(block), x.position_stride, block.tile.size,
                               block.end - block.begin, begin_of(next), batch);
               add_moment_tiles<Element>(batch, block.tile.size,
                                         limbs.channel_range(block.begin, block.end));
             });
  canonicalize_limbs(limbs);
}

template <class Element>
NORMSCOPE_INLINE void gradient_sums_of_rows(const GradientTerms<Element>& terms,
                                            std::int64_t x_stride, std::int64_t dy_stride,
                                            std::int64_t rows, std::int64_t channels,
                                            const Arithmetic<Element>* mean_hi,
                                            const GradientTerms<Element>& next, TileBatch& batch) {
  using Real = Arithmetic<Element>;
  const Element* const x = terms.x;
  const Element* const dy = terms.dy;
  FetchAhead fetch_ahead(next, x_stride, channels);
  BatchSums<Real> sums;
  for (std::int64_t c = 0; c < channels || c % kLanesOf<Real> != 0; ++c) {
    sums.center[c] = c < channels ? mean_hi[c] : Real{0};
  }
  for_channel_blocks<Real>(channels, [&]<int kVectors>(std::int64_t c, std::int64_t count) {
    if (count >= kLanesOf<Real> && x_stride == dy_stride) {
      sums_of_rows<kVectors>(GradientTerms<Element>{x + c, dy + c}, x_stride, rows, sums.center + c,
                             fetch_ahead, sums.first + c, sums.second + c);
    } else {
      constexpr std::int64_t kWidth = kLanesOf<Real>;
      for (std::int64_t i = c; i < c + count; i += kWidth) {
        NarrowTile<Element> narrow_x;
        NarrowTile<Element> narrow_dy;
        narrow_x.copy(x + i, x_stride, rows, smaller(kWidth, c + count - i));
        narrow_dy.copy(dy + i, dy_stride, rows, smaller(kWidth, c + count - i));
        sums_of_rows<1>(GradientTerms<Element>{narrow_x.elements, narrow_dy.elements}, kWidth, rows,
                        sums.center + i, fetch_ahead, sums.first + i, sums.second + i);
      }
    }
  });
  for (std::int64_t c = 0; c < channels; c += kLanesOf<Real>) {
    store_wide(batch.first + c, load(sums.first + c));
    store_wide(batch.second + c, load(sums.second + c));
  }
  for_overflown<Element>(batch, channels, [&](std::int64_t c) {
    NarrowTile<Element> narrow_x;
    NarrowTile<Element> narrow_dy;
    narrow_x.copy(x + c, x_stride, rows, 1);
    narrow_dy.copy(dy + c, dy_stride, rows, 1);
    put_sums_in_float64(Layout::kChannelsLast,
                        GradientTerms<Element>{narrow_x.elements, narrow_dy.elements},
                        narrow_x.kWidth, rows, static_cast<double>(mean_hi[c]), batch, c);
  });
}

template <class Element>
void add_gradient_sums_channels_last(const TensorView& x, const TensorView& dy,
                                     const Arithmetic<Element>* mean_hi, TileRange tiles,
                                     LimbsView limbs) {
  const auto terms_of = [&](const TileChannels& block) {
    const auto& [sample, position, size] = block.tile;
    return GradientTerms<Element>{element_at<Element>(x, sample, block.begin, position),
                                  element_at<Element>(dy, sample, block.begin, position)};
  };
  TileBatch batch;
  for_blocks(x, Layout::kChannelsLast, tiles,
             [&](const TileChannels& block, const TileChannels& next) {
               gradient_sums_of_rows(terms_of(block), x.position_stride, dy.position_stride,
                                     block.tile.size, block.end - block.begin,
                                     mean_hi + block.begin, terms_of(next), batch);
               add_gradient_tiles(batch, limbs.channel_range(block.begin, block.end));
             });
  canonicalize_limbs(limbs);
}
