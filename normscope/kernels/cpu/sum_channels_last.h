// SPDX-License-Identifier: Apache-2.0
//
// Sums tensors with contiguous channels. Included once by each target (vector.h says why).
//
// Takes four vectors of channels at a time, then one. Remaining channels are copied into columns as
// wide as a full vector.

// A tile with fewer channels than a vector has elements, padded with zeros.
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

// The pivots of a vector of channels.
template <class Run>
NORMSCOPE_INLINE auto pivots_of_rows(const Run& run, std::int64_t rows) {
  using Real = typename Run::Real;
  constexpr std::int64_t kSamples = kChannelsLastTile.pivot_samples;
  const PivotSamples samples = pivot_samples(Layout::kChannelsLast, rows);
  Vector<Real> lanes[kSamples];
  for (std::int64_t j = 0; j < kSamples; ++j) {
    lanes[j] = j < samples.count ? load(run.at(j * samples.stride, 0).x) : Vector<Real>{};
  }
  fold_halves<1>(lanes);
  return lanes[0] / broadcast(static_cast<Real>(samples.count));
}

// Sums kVectors vectors of channels over n rows into the batch, starting at `slot`. Lane l takes
// the rows 32 l to 32 l + 31.
template <int kVectors, class Run, class Real>
NORMSCOPE_INLINE void sum_rows(const Run& run, std::int64_t n, FetchAhead<Run>& fetch_ahead,
                               TileBatch<Real>& batch, std::int64_t slot) {
  constexpr int kWidth = kLanesOf<Real>;
  constexpr std::int64_t kLanes = kChannelsLastTile.lanes;
  constexpr std::int64_t kChain = kChannelsLastTile.chain;
  Terms<Vector<Real>> lanes[kLanes][kVectors];
  for (std::int64_t lane = 0; lane < kLanes; ++lane) {
    const std::int64_t end = smaller(n, (lane + 1) * kChain);
    Vector<Real> centers[kVectors];
    Vector<Real> first[kVectors] = {};
    Vector<Real> second[kVectors] = {};
    for (int v = 0; v < kVectors; ++v) centers[v] = load(batch.center + slot + v * kWidth);
    for (std::int64_t row = lane * kChain; row < end; ++row) {
      fetch_ahead(kVectors * kWidth);
      for (int v = 0; v < kVectors; ++v) {
        const auto term = run.at(row, v * kWidth).terms(kLoadVector, centers[v]);
        first[v] += term.first;
        second[v] += term.second;
      }
    }
    for (int v = 0; v < kVectors; ++v) lanes[lane][v] = {first[v], second[v]};
  }
  for (int v = 0; v < kVectors; ++v) {
    batch.set_sums(slot + v * kWidth, (lanes[0][v] + lanes[2][v]) + (lanes[1][v] + lanes[3][v]));
  }
}

template <class AnyTerms>
void add_sums_channels_last(const AnyTerms& terms, TileRange tiles, LimbsView limbs) {
  using Run = typename AnyTerms::Run;
  using Element = typename Run::ElementType;
  using Real = typename Run::Real;
  constexpr std::int64_t kWidth = kLanesOf<Real>;
  const auto sum = [&](const TileChannels& block, const TileChannels& next,
                       TileBatch<Real>& batch) {
    const std::int64_t channels = block.end - block.begin;
    const std::int64_t rows = block.tile.size;
    const Run run = terms.run(block.tile.sample, block.begin, block.tile.begin);
    FetchAhead<Run> fetch_ahead(terms.run(next.tile.sample, next.begin, next.tile.begin), channels);
    std::int64_t slot = 0;
    const auto sum_vectors = [&]<int kVectors>(const Run& of_vectors,
                                               std::integral_constant<int, kVectors>) {
      for (int v = 0; AnyTerms::kHasPivot && v < kVectors; ++v) {
        store_bytes(batch.center + slot + v * kWidth,
                    pivots_of_rows(of_vectors.at(0, v * kWidth), rows));
      }
      sum_rows<kVectors>(of_vectors, rows, fetch_ahead, batch, slot);
      slot += kVectors * kWidth;
    };
    const std::integral_constant<int, 4> four;
    const std::integral_constant<int, 1> one;
    while (slot + 4 * kWidth <= channels) sum_vectors(run.at(0, slot), four);
    while (slot + kWidth <= channels) sum_vectors(run.at(0, slot), one);
    if (slot == channels) return;
    NarrowTile<Element> narrow[Run::kInputs];
    NarrowTile<Element>* to = narrow;
    const auto copy = [&](const Element* from, std::int64_t stride) {
      to->copy(from, stride, rows, channels - slot);
      return (to++)->elements;
    };
    sum_vectors(run.at(0, slot).copied(copy), one);
  };
  add_tiles<Real>(terms, Layout::kChannelsLast, tiles, limbs, sum);
}
