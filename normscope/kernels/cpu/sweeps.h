// SPDX-License-Identifier: Apache-2.0
//
// The sweeps over a tensor: two that sum, two that apply. Included once by each target (vector.h says
// why).

// Where a tile lies.
struct Tile {
  std::int64_t sample;
  std::int64_t begin;  // position
  std::int64_t size;   // positions
};

NORMSCOPE_INLINE Tile tile_at(std::int64_t index, std::int64_t positions, const TileShape& shape,
                              std::int64_t tiles_per_sample) {
  const std::int64_t begin = index % tiles_per_sample * shape.positions;
  const std::int64_t rest = positions - begin;
  return {index / tiles_per_sample, begin, rest < shape.positions ? rest : shape.positions};
}

template <class Element>
NORMSCOPE_INLINE const Element* element_at(const TensorView& x, std::int64_t n, std::int64_t c,
                                           std::int64_t p) {
  return static_cast<const Element*>(x.data) + n * x.sample_stride + c * x.channel_stride +
         p * x.position_stride;
}

template <class Element>
NORMSCOPE_INLINE Element* element_at(const MutableTensorView& x, std::int64_t n, std::int64_t c,
                                     std::int64_t p) {
  return static_cast<Element*>(x.data) + n * x.sample_stride + c * x.channel_stride +
         p * x.position_stride;
}

NORMSCOPE_INLINE std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// Sums, channels first.

template <class Element>
NORMSCOPE_INLINE void moments_of_neighbours(const Element* x, std::int64_t n, TileBatch& batch,
                                            std::int64_t slot) {
  using Real = Arithmetic<Element>;
  const MomentTerms<Element> terms{x};
  const Real pivot = tile_pivot<Real, Real>(Layout::kChannelsFirst, x, 1, n);
  const Terms<Real> sums = sums_of_neighbours(terms, n, pivot);
  batch.pivot[slot] = static_cast<double>(pivot);
  batch.first[slot] = static_cast<double>(sums.first);
  batch.second[slot] = static_cast<double>(sums.second);
  if (sizeof(Real) < sizeof(double) && !is_finite(sums.first + sums.second)) {
    batch.pivot[slot] =
        static_cast<double>(tile_pivot<double, Real>(Layout::kChannelsFirst, x, 1, n));
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

template <class Element>
NORMSCOPE_INLINE void gradient_sums_of_neighbours(const Element* x, const Element* dy,
                                                  std::int64_t n, Arithmetic<Element> mean_hi,
                                                  TileBatch& batch, std::int64_t slot) {
  using Real = Arithmetic<Element>;
  const GradientTerms<Element> terms{x, dy};
  const Terms<Real> sums = sums_of_neighbours(terms, n, mean_hi);
  batch.first[slot] = static_cast<double>(sums.first);
  batch.second[slot] = static_cast<double>(sums.second);
  if (sizeof(Real) < sizeof(double) && !is_finite(sums.first + sums.second)) {
    const Terms<double> again = sums_in_float64(Layout::kChannelsFirst, terms, 1, n,
                                                static_cast<double>(mean_hi));
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

// Sums, channels last: blocks of channels that fill four vectors, then one vector, then what is left,
// which is copied into columns of a full vector's width.

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

// Calls function.template operator()<vectors>(c, count) for blocks of channels from 0 to `channels`;
// count is below a vector's width for the last one at most.
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

// Puts sums [channels] of Real into the batch as float64, and whether all are finite.
template <class Real>
NORMSCOPE_INLINE bool put_sums(const Real* first, const Real* second, std::int64_t channels,
                               TileBatch& batch) {
  Doubles not_finite{};
  for (std::int64_t c = 0; c < channels; c += kDoubles) {
    const Doubles one = load_as_doubles(first + c);
    const Doubles other = load_as_doubles(second + c);
    store(batch.first + c, one);
    store(batch.second + c, other);
    not_finite += (one - one) + (other - other);
  }
  return !any_nonzero(not_finite);
}

template <class Element>
NORMSCOPE_INLINE void pivots_of_rows(const Element* x, std::int64_t row_stride, std::int64_t rows,
                                     std::int64_t channels, Arithmetic<Element>* pivots) {
  using Real = Arithmetic<Element>;
  const PivotSamples samples = pivot_samples(Layout::kChannelsLast, rows);
  constexpr std::int64_t kSamples = kChannelsLastTile.pivot_samples;
  std::int64_t c = 0;
  for (; c + kLanesOf<Real> <= channels; c += kLanesOf<Real>) {
    Vector<Real> lanes[kSamples] = {};
    for (std::int64_t j = 0; j < samples.count; ++j) {
      lanes[j] = load(x + j * samples.stride * row_stride + c);
    }
    for (std::int64_t half = kSamples / 2; half >= 1; half /= 2) {
      for (std::int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    store(pivots + c, lanes[0] / broadcast(static_cast<Real>(samples.count)));
  }
  for (; c < channels; ++c) {
    pivots[c] = tile_pivot<Real, Real>(Layout::kChannelsLast, x + c, row_stride, rows);
  }
}

// Room for the sums of a batch before they are widened; what lies beyond the last channel is zero.
template <class Real>
struct BatchSums {
  alignas(kVectorBytes) Real center[kBatchChannels] = {};
  alignas(kVectorBytes) Real first[kBatchChannels] = {};
  alignas(kVectorBytes) Real second[kBatchChannels] = {};
};

template <class Element>
NORMSCOPE_INLINE void moments_of_rows(const Element* x, std::int64_t row_stride, std::int64_t rows,
                                      std::int64_t channels, TileBatch& batch) {
  using Real = Arithmetic<Element>;
  BatchSums<Real> sums;
  pivots_of_rows(x, row_stride, rows, channels, sums.center);
  for_channel_blocks<Real>(channels, [&]<int kVectors>(std::int64_t c, std::int64_t count) {
    if (count >= kLanesOf<Real>) {
      sums_of_rows<kVectors>(MomentTerms<Element>{x + c}, row_stride, rows, sums.center + c,
                             sums.first + c, sums.second + c);
    } else {
      NarrowTile<Element> narrow;
      narrow.copy(x + c, row_stride, rows, count);
      sums_of_rows<1>(MomentTerms<Element>{narrow.elements}, narrow.kWidth, rows, sums.center + c,
                      sums.first + c, sums.second + c);
    }
  });
  for (std::int64_t c = 0; c < channels; ++c) {
    batch.pivot[c] = static_cast<double>(sums.center[c]);
  }
  const bool all_finite = put_sums(sums.first, sums.second, channels, batch);
  if (all_finite || sizeof(Real) == sizeof(double)) return;
  for (std::int64_t c = 0; c < channels; ++c) {
    if (is_finite(batch.first[c] + batch.second[c])) continue;
    batch.pivot[c] = static_cast<double>(
        tile_pivot<double, Real>(Layout::kChannelsLast, x + c, row_stride, rows));
    const Terms<double> again = sums_in_float64(Layout::kChannelsLast, MomentTerms<Element>{x + c},
                                                row_stride, rows, batch.pivot[c]);
    batch.first[c] = again.first;
    batch.second[c] = again.second;
  }
}

template <class Element>
void add_moments_channels_last(const TensorView& x, TileRange tiles, LimbsView limbs) {
  const std::int64_t per_sample = tiles_per_sample(Layout::kChannelsLast, x.positions);
  TileBatch batch;
  for (std::int64_t index = tiles.begin; index < tiles.end; ++index) {
    const Tile tile = tile_at(index, x.positions, kChannelsLastTile, per_sample);
    for (std::int64_t c = 0; c < x.channels; c += kBatchChannels) {
      const std::int64_t end = smaller(c + kBatchChannels, x.channels);
      moments_of_rows(element_at<Element>(x, tile.sample, c, tile.begin), x.position_stride,
                      tile.size, end - c, batch);
      add_moment_tiles(batch, tile.size, limbs.channel_range(c, end));
    }
  }
  canonicalize_limbs(limbs);
}

template <class Element>
NORMSCOPE_INLINE void gradient_sums_of_rows(const Element* x, std::int64_t x_stride,
                                            const Element* dy, std::int64_t dy_stride,
                                            std::int64_t rows, std::int64_t channels,
                                            const Arithmetic<Element>* mean_hi, TileBatch& batch) {
  using Real = Arithmetic<Element>;
  BatchSums<Real> sums;
  for (std::int64_t c = 0; c < channels; ++c) sums.center[c] = mean_hi[c];
  for_channel_blocks<Real>(channels, [&]<int kVectors>(std::int64_t c, std::int64_t count) {
    if (count >= kLanesOf<Real> && x_stride == dy_stride) {
      sums_of_rows<kVectors>(GradientTerms<Element>{x + c, dy + c}, x_stride, rows,
                             sums.center + c, sums.first + c, sums.second + c);
    } else {
      constexpr std::int64_t kWidth = kLanesOf<Real>;
      for (std::int64_t i = c; i < c + count; i += kWidth) {
        NarrowTile<Element> narrow_x;
        NarrowTile<Element> narrow_dy;
        narrow_x.copy(x + i, x_stride, rows, smaller(kWidth, c + count - i));
        narrow_dy.copy(dy + i, dy_stride, rows, smaller(kWidth, c + count - i));
        sums_of_rows<1>(GradientTerms<Element>{narrow_x.elements, narrow_dy.elements}, kWidth,
                        rows, sums.center + i, sums.first + i, sums.second + i);
      }
    }
  });
  const bool all_finite = put_sums(sums.first, sums.second, channels, batch);
  if (all_finite || sizeof(Real) == sizeof(double)) return;
  for (std::int64_t c = 0; c < channels; ++c) {
    if (is_finite(batch.first[c] + batch.second[c])) continue;
    NarrowTile<Element> narrow_x;
    NarrowTile<Element> narrow_dy;
    narrow_x.copy(x + c, x_stride, rows, 1);
    narrow_dy.copy(dy + c, dy_stride, rows, 1);
    const Terms<double> again = sums_in_float64(
        Layout::kChannelsLast, GradientTerms<Element>{narrow_x.elements, narrow_dy.elements},
        narrow_x.kWidth, rows, static_cast<double>(mean_hi[c]));
    batch.first[c] = again.first;
    batch.second[c] = again.second;
  }
}

template <class Element>
void add_gradient_sums_channels_last(const TensorView& x, const TensorView& dy,
                                     const Arithmetic<Element>* mean_hi, TileRange tiles,
                                     LimbsView limbs) {
  const std::int64_t per_sample = tiles_per_sample(Layout::kChannelsLast, x.positions);
  TileBatch batch;
  for (std::int64_t index = tiles.begin; index < tiles.end; ++index) {
    const Tile tile = tile_at(index, x.positions, kChannelsLastTile, per_sample);
    for (std::int64_t c = 0; c < x.channels; c += kBatchChannels) {
      const std::int64_t end = smaller(c + kBatchChannels, x.channels);
      gradient_sums_of_rows(element_at<Element>(x, tile.sample, c, tile.begin), x.position_stride,
                            element_at<Element>(dy, tile.sample, c, tile.begin),
                            dy.position_stride, tile.size, end - c, mean_hi + c, batch);
      add_gradient_tiles(batch, limbs.channel_range(c, end));
    }
  }
  canonicalize_limbs(limbs);
}

// Sums of [N, C] inputs: one element a tile. It is its own pivot, so that its square goes into the limbs
// as it is.

template <class Element>
NORMSCOPE_INLINE void widen_elements(const Element* from, std::int64_t count,
                                     Arithmetic<Element>* to) {
  constexpr std::int64_t kWidth = kLanesOf<Arithmetic<Element>>;
  std::int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = widen(from[i]);
}

template <class Element>
void add_moments_of_elements(const TensorView& x, TileRange tiles, LimbsView limbs) {
  using Real = Arithmetic<Element>;
  alignas(kVectorBytes) Real values[kBatchChannels];
  for (std::int64_t n = tiles.begin; n < tiles.end; ++n) {
    for (std::int64_t c = 0; c < x.channels; c += kBatchChannels) {
      const std::int64_t end = smaller(c + kBatchChannels, x.channels);
      widen_elements(element_at<Element>(x, n, c, 0), end - c, values);
      for_channels(end - c, [&]<class Doubles_>(std::int64_t i, Doubles_) {
        Doubles_ value;
        if constexpr (sizeof(Doubles_) == sizeof(double)) {
          value = static_cast<double>(values[i]);
        } else {
          value = load_as_doubles(values + i);
        }
        add_part(limbs, 0, c + i, value);
        if constexpr (sizeof(Real) == sizeof(double)) {
          add_part(limbs, 1, c + i, two_product(value, value));
        } else {
          add_part(limbs, 1, c + i, value * value);  // exact: 48 bits
        }
      });
    }
  }
  canonicalize_limbs(limbs);
}

// The formulas, element by element. Formula is Normalize or InputGradient, Coefficients the struct of
// arrays that its members come from.

template <class Value, class Real>
NORMSCOPE_INLINE Value coefficient(const Real* values, std::int64_t c) {
  return load_bytes<Value>(values + c);
}

template <class Value, class Real>
NORMSCOPE_INLINE Normalize<Value> formula_at(const NormalizeCoefficients<Real>& coefficients,
                                             std::int64_t c) {
  return {coefficient<Value>(coefficients.mean_hi, c), coefficient<Value>(coefficients.mean_lo, c),
          coefficient<Value>(coefficients.scale, c), coefficient<Value>(coefficients.bias, c)};
}

template <class Value, class Real>
NORMSCOPE_INLINE InputGradient<Value> formula_at(
    const InputGradientCoefficients<Real>& coefficients, std::int64_t c) {
  return {coefficient<Value>(coefficients.mean_hi, c), coefficient<Value>(coefficients.mean_lo, c),
          coefficient<Value>(coefficients.scale, c), coefficient<Value>(coefficients.mean_dy, c),
          coefficient<Value>(coefficients.slope, c)};
}

template <class Real>
NORMSCOPE_INLINE Normalize<Vector<Real>> broadcast_formula(const Normalize<Real>& one) {
  return {broadcast(one.mean_hi), broadcast(one.mean_lo), broadcast(one.scale),
          broadcast(one.bias)};
}

template <class Real>
NORMSCOPE_INLINE InputGradient<Vector<Real>> broadcast_formula(const InputGradient<Real>& one) {
  return {broadcast(one.mean_hi), broadcast(one.mean_lo), broadcast(one.scale),
          broadcast(one.mean_dy), broadcast(one.slope)};
}

// Inputs of a formula at one place: x, or x and dy.
template <class Element>
struct OneInput {
  const Element* x;

  template <class Formula>
  NORMSCOPE_INLINE auto apply(const Formula& formula, std::int64_t i) const {
    return formula(load(x + i));
  }
  template <class Formula>
  NORMSCOPE_INLINE auto apply_to_one(const Formula& formula, std::int64_t i) const {
    return formula(widen(x[i]));
  }
  NORMSCOPE_INLINE OneInput operator+(std::int64_t offset) const { return {x + offset}; }
};

template <class Element>
struct TwoInputs {
  const Element* x;
  const Element* dy;

  template <class Formula>
  NORMSCOPE_INLINE auto apply(const Formula& formula, std::int64_t i) const {
    return formula(load(x + i), load(dy + i));
  }
  template <class Formula>
  NORMSCOPE_INLINE auto apply_to_one(const Formula& formula, std::int64_t i) const {
    return formula(widen(x[i]), widen(dy[i]));
  }
  NORMSCOPE_INLINE TwoInputs operator+(std::int64_t offset) const { return {x + offset, dy + offset}; }
};

// output[i] = formula(inputs[i]) for n neighbours of one channel.
template <class Element, class Inputs, class Formula>
NORMSCOPE_INLINE void apply_to_neighbours(const Inputs& inputs, const Formula& formula,
                                          std::int64_t n, Stores stores, Element* output) {
  constexpr std::int64_t kWidth = kLanesOf<Arithmetic<Element>>;
  const auto vector_formula = broadcast_formula(formula);
  std::int64_t i = 0;
  if (stores == Stores::kStreaming) {
    for (; i < n && !is_aligned(output + i); ++i) {
      output[i] = narrow<Element>(inputs.apply_to_one(formula, i));
    }
    for (; i + kStreamWidth<Element> <= n; i += kStreamWidth<Element>) {
      if constexpr (sizeof(Element) == 2) {
        stream(output + i, inputs.apply(vector_formula, i),
               inputs.apply(vector_formula, i + kWidth));
      } else {
        stream(output + i, inputs.apply(vector_formula, i));
      }
    }
  }
  for (; i + kWidth <= n; i += kWidth) store(output + i, inputs.apply(vector_formula, i));
  for (; i < n; ++i) output[i] = narrow<Element>(inputs.apply_to_one(formula, i));
}

// output[c] = formula_c(inputs[c]) for the channels of one position.
template <class Element, class Inputs, class Coefficients>
NORMSCOPE_INLINE void apply_to_channels(const Inputs& inputs, const Coefficients& coefficients,
                                        std::int64_t channels, Stores stores, Element* output) {
  using Real = Arithmetic<Element>;
  constexpr std::int64_t kWidth = kLanesOf<Real>;
  std::int64_t c = 0;
  if (stores == Stores::kStreaming) {
    for (; c < channels && !is_aligned(output + c); ++c) {
      output[c] = narrow<Element>(inputs.apply_to_one(formula_at<Real>(coefficients, c), c));
    }
    for (; c + kStreamWidth<Element> <= channels; c += kStreamWidth<Element>) {
      const auto first = inputs.apply(formula_at<Vector<Real>>(coefficients, c), c);
      if constexpr (sizeof(Element) == 2) {
        stream(output + c, first,
               inputs.apply(formula_at<Vector<Real>>(coefficients, c + kWidth), c + kWidth));
      } else {
        stream(output + c, first);
      }
    }
  }
  for (; c + kWidth <= channels; c += kWidth) {
    store(output + c, inputs.apply(formula_at<Vector<Real>>(coefficients, c), c));
  }
  for (; c < channels; ++c) {
    output[c] = narrow<Element>(inputs.apply_to_one(formula_at<Real>(coefficients, c), c));
  }
}

// Applies a formula to the tiles, last ones first. inputs_at(n, c, p) gives the inputs there.
template <class Element, class InputsAt, class Coefficients>
NORMSCOPE_INLINE void apply_to_tiles(const InputsAt& inputs_at, const Coefficients& coefficients,
                                     Layout layout, TileRange tiles, Stores stores,
                                     const MutableTensorView& y) {
  using Real = Arithmetic<Element>;
  const std::int64_t per_sample = tiles_per_sample(layout, y.positions);
  for (std::int64_t index = tiles.end; index-- > tiles.begin;) {
    const Tile tile = tile_at(index, y.positions, tile_shape(layout), per_sample);
    const std::int64_t n = tile.sample;
    if (layout == Layout::kChannelsFirst) {
      for (std::int64_t c = 0; c < y.channels; ++c) {
        apply_to_neighbours(inputs_at(n, c, tile.begin), formula_at<Real>(coefficients, c),
                            tile.size, stores, element_at<Element>(y, n, c, tile.begin));
      }
    } else {
      for (std::int64_t p = tile.begin + tile.size; p-- > tile.begin;) {
        apply_to_channels(inputs_at(n, 0, p), coefficients, y.channels, stores,
                          element_at<Element>(y, n, 0, p));
      }
    }
  }
  if (stores == Stores::kStreaming) finish_streaming();
}

// The pieces of pieces.h.

template <class Element>
void add_moments(const TensorView& x, TileRange tiles, LimbsView limbs) {
  if (x.layout() == Layout::kChannelsFirst) {
    add_moments_channels_first<Element>(x, tiles, limbs);
  } else if (x.positions == 1) {
    add_moments_of_elements<Element>(x, tiles, limbs);
  } else {
    add_moments_channels_last<Element>(x, tiles, limbs);
  }
}

template <class Element>
void add_gradient_sums(const TensorView& x, const TensorView& dy,
                       const Arithmetic<Element>* mean_hi, TileRange tiles, LimbsView limbs) {
  if (x.layout() == Layout::kChannelsFirst) {
    add_gradient_sums_channels_first<Element>(x, dy, mean_hi, tiles, limbs);
  } else {
    add_gradient_sums_channels_last<Element>(x, dy, mean_hi, tiles, limbs);
  }
}

template <class Element>
void normalize(const TensorView& x, const NormalizeCoefficients<Arithmetic<Element>>& coefficients,
               TileRange tiles, Stores stores, const MutableTensorView& y) {
  const auto inputs_at = [&](std::int64_t n, std::int64_t c, std::int64_t p) {
    return OneInput<Element>{element_at<Element>(x, n, c, p)};
  };
  apply_to_tiles<Element>(inputs_at, coefficients, x.layout(), tiles, stores, y);
}

template <class Element>
void input_gradient(const TensorView& x, const TensorView& dy,
                    const InputGradientCoefficients<Arithmetic<Element>>& coefficients,
                    TileRange tiles, Stores stores, const MutableTensorView& dx) {
  const auto inputs_at = [&](std::int64_t n, std::int64_t c, std::int64_t p) {
    return TwoInputs<Element>{element_at<Element>(x, n, c, p), element_at<Element>(dy, n, c, p)};
  };
  apply_to_tiles<Element>(inputs_at, coefficients, x.layout(), tiles, stores, dx);
}

template <class Element>
constexpr ElementPieces<Element> pieces_of() {
  return {.add_moments = add_moments<Element>,
          .add_gradient_sums = add_gradient_sums<Element>,
          .normalize = normalize<Element>,
          .input_gradient = input_gradient<Element>};
}
