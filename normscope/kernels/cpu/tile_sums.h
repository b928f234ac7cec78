// SPDX-License-Identifier: Apache-2.0
//
// The sums of the tiles of many channels at a time, in the tree of core/tiles.h, before they go
// into the limbs. Included once by each target (vector.h says why).

// How many channels' tile sums are collected before they go into the limbs.
inline constexpr std::int64_t kBatchChannels = 128;

// Channels [begin, end) of a tile, at most kBatchChannels.
struct TileChannels {
  Tile tile;
  std::int64_t begin;
  std::int64_t end;
};

// Sums over the same tile for up to kBatchChannels channels. Entries are set one whole vector at a
// time, possibly past the last channel.
template <class Real>
struct TileBatch {
  alignas(kVectorBytes) Real center[kBatchChannels];    // the pivot a, or the mean
  alignas(kVectorBytes) double first[kBatchChannels];   // sum(x - a), or sum(dy)
  alignas(kVectorBytes) double second[kBatchChannels];  // sum((x - a)^2), or sum(dy (x - mean))

  // Sets the sums of a vector of channels.
  NORMSCOPE_INLINE void set_sums(std::int64_t slot, const Terms<Vector<Real>>& sums) {
    store_wide(first + slot, sums.first);
    store_wide(second + slot, sums.second);
  }
};

// Sets the centers if they are means. Pivots are computed together with each tile's sums.
template <class AnyTerms, class Real>
NORMSCOPE_INLINE void set_means(const AnyTerms& terms, const TileChannels& block,
                                TileBatch<Real>& batch) {
  const std::int64_t channels = block.end - block.begin;
  const Real* means = terms.means_from(block.begin);
  for (std::int64_t c = 0; c < channels; c += kLanesOf<Real>) {
    const std::int64_t count = channels - c;
    const bool is_full = count >= kLanesOf<Real>;
    store_bytes(batch.center + c, is_full ? load(means + c) : load_few(means + c, count));
  }
}

// How many vectors hold the lanes of a tile.
template <class Real>
inline constexpr int kLaneVectors = kMaxLanes / kLanesOf<Real>;

// Adds the upper half of the lanes to the lower half, and so on, until the first kCount are left.
template <int kCount, class Value, std::size_t kSize>
NORMSCOPE_INLINE void fold_halves(Value (&lanes)[kSize]) {
  for (int half = static_cast<int>(kSize) / 2; half >= kCount; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
}

// Lanes in memory, for elements that come one at a time.
struct LanesInFloat64 {
  double values[kMaxLanes] = {};

  NORMSCOPE_INLINE double fold() {
    fold_halves<1>(values);
    return values[0];
  }
};

// The pivot of a tile of n rows, in float64 except for the final rounding.
template <class Run>
[[gnu::noinline]] auto pivot_in_float64(Layout layout, const Run& run, std::int64_t n) {
  const PivotSamples samples = pivot_samples(layout, n);
  LanesInFloat64 lanes;
  for (std::int64_t j = 0; j < samples.count; ++j) {
    lanes.values[j] = kLoadOne<double>(run.at(j * samples.stride, 0).x);
  }
  return static_cast<typename Run::Real>(lanes.fold() / static_cast<double>(samples.count));
}

template <class Run>
[[gnu::noinline]] Terms<double> sums_in_float64(Layout layout, const Run& run, std::int64_t n,
                                                double center) {
  LanesInFloat64 first;
  LanesInFloat64 second;
  for (std::int64_t i = 0; i < n; ++i) {
    const Terms<double> term = run.at(i, 0).terms(kLoadOne<double>, center);
    first.values[lane_of(layout, i)] += term.first;
    second.values[lane_of(layout, i)] += term.second;
  }
  return {first.fold(), second.fold()};
}

template <class Value>
NORMSCOPE_INLINE bool is_finite(Value value) {
  return value - value == 0;
}

// Repeats in float64 the tile sums that are not finite in float32. In float64 they may be finite.
template <class AnyTerms, class Real>
NORMSCOPE_INLINE void sum_overflown_again(const AnyTerms& terms, Layout layout,
                                          const TileChannels& block, TileBatch<Real>& batch) {
  if constexpr (std::is_same_v<Real, double>) return;
  const std::int64_t channels = block.end - block.begin;
  Doubles zero_if_finite{};
  for (std::int64_t c = 0; c < channels; c += kDoubles) {
    const Doubles sum = load(batch.first + c) + load(batch.second + c);
    zero_if_finite += sum - sum;
  }
  if (!any_nonzero(zero_if_finite)) return;
  for (std::int64_t c = 0; c < channels; ++c) {
    if (is_finite(batch.first[c] + batch.second[c])) continue;
    const Tile& tile = block.tile;
    const auto run = terms.run(tile.sample, block.begin + c, tile.begin);
    if constexpr (AnyTerms::kHasPivot) batch.center[c] = pivot_in_float64(layout, run, tile.size);
    const auto center = static_cast<double>(batch.center[c]);
    const Terms<double> sums = sums_in_float64(layout, run, tile.size, center);
    batch.first[c] = sums.first;
    batch.second[c] = sums.second;
  }
}

// Converts sums around a pivot to sums around zero.
template <class Real, class Value>
NORMSCOPE_INLINE TileMoments<Value> tile_moments(Value n, Value pivot, Value first, Value second) {
  if constexpr (std::is_same_v<Real, double>)
    return moments_about_zero(n, pivot, first, second);
  else
    return moments_about_narrow_pivot(n, pivot, first, second);
}

template <class AnyTerms, class Real>
NORMSCOPE_INLINE void add_batch(const TileBatch<Real>& batch, std::int64_t tile_size,
                                const LimbsView& limbs) {
  for_channels(limbs.channels, [&]<class Value>(std::int64_t c, Value) {
    const Value first = load_bytes<Value>(batch.first + c);
    const Value second = load_bytes<Value>(batch.second + c);
    if constexpr (AnyTerms::kHasPivot) {
      const auto tile = tile_moments<Real>(Value{} + static_cast<double>(tile_size),
                                           load_wide<Value>(batch.center + c), first, second);
      add_part(limbs, kSumOfValues, c, tile.sum);
      add_part(limbs, kSumOfProducts, c, tile.sum_of_squares);
    } else {
      add_part(limbs, kSumOfValues, c, first);
      add_part(limbs, kSumOfProducts, c, second);
    }
  });
}

// Adds tiles to limbs, one block of channels at a time. sum(block, next, batch) sums one block.
// `next` is the block after it, or the block itself if it is the last.
template <class Real, class AnyTerms, class Sum>
NORMSCOPE_INLINE void add_tiles(const AnyTerms& terms, Layout layout, TileRange tiles,
                                const LimbsView& limbs, const Sum& sum) {
  const TensorView& x = terms.x;
  const std::int64_t per_sample = tiles_per_sample(layout, x.positions);
  const std::int64_t per_tile = (x.channels + kBatchChannels - 1) / kBatchChannels;
  const auto block_at = [&](std::int64_t i) {
    const std::int64_t begin = i % per_tile * kBatchChannels;
    return TileChannels{
        tile_at(tiles.begin + i / per_tile, x.positions, tile_shape(layout), per_sample), begin,
        smaller(begin + kBatchChannels, x.channels)};
  };
  const std::int64_t blocks = (tiles.end - tiles.begin) * per_tile;
  TileBatch<Real> batch;
  for (std::int64_t i = 0; i < blocks; ++i) {
    const TileChannels block = block_at(i);
    if constexpr (!AnyTerms::kHasPivot) set_means(terms, block, batch);
    sum(block, block_at(smaller(i + 1, blocks - 1)), batch);
    sum_overflown_again(terms, layout, block, batch);
    add_batch<AnyTerms>(batch, block.tile.size, limbs.channel_range(block.begin, block.end));
  }
}

// Prefetches rows of `row_length` elements in memory order, `count` elements per call, while
// something else is summed. Sums read memory in an order that the hardware does not predict: a few
// channels of all rows, or parts of a few planes. In `make bench-networks`, prefetching makes the
// normalization ops of networks 10 % faster.
template <class Run>
class FetchAhead {
 public:
  NORMSCOPE_INLINE FetchAhead(const Run& run, std::int64_t row_length)
      : row_(run), row_length_(row_length) {}

  NORMSCOPE_INLINE void operator()(std::int64_t count) {
    for (std::int64_t i = 0; i < count; i += kLineElements<typename Run::ElementType>) {
      row_.at(0, element_ + i).prefetch_line();
    }
    element_ += count;
    if (element_ < row_length_) return;
    element_ = 0;
    row_ = row_.at(1, 0);
  }

 private:
  Run row_;
  std::int64_t row_length_;
  std::int64_t element_ = 0;
};
