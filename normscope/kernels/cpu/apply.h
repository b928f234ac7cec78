// SPDX-License-Identifier: Apache-2.0
//
// The sweeps that apply. Included once by each target (vector.h says why).

// The formulas, element by element. Formula is Normalize or InputGradient, Coefficients the struct
// of arrays that its members come from.

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
  NORMSCOPE_INLINE Block<Element> apply_to_block(const Formula& formula, std::int64_t i) const {
    auto block = load_block(x + i);
    for (auto& value : block.vectors) value = formula(value);
    return block;
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
  NORMSCOPE_INLINE Block<Element> apply_to_block(const Formula& formula, std::int64_t i) const {
    auto block = load_block(x + i);
    const auto dy_block = load_block(dy + i);
    for (int v = 0; v < kBlockVectors<Element>; ++v) {
      block.vectors[v] = formula(block.vectors[v], dy_block.vectors[v]);
    }
    return block;
  }
  template <class Formula>
  NORMSCOPE_INLINE auto apply_to_one(const Formula& formula, std::int64_t i) const {
    return formula(widen(x[i]), widen(dy[i]));
  }
  NORMSCOPE_INLINE TwoInputs operator+(std::int64_t offset) const {
    return {x + offset, dy + offset};
  }
};

// output[i] = formula_i(inputs[i]) for i from 0 to n. bytes_of(i) gives a vector's bytes of output
// from i on, one_of(i) the formula for i alone. The ends that no whole aligned vector covers are
// vectors that overlap it: the same numbers twice, which is why outputs may not be inputs.
template <class Element, class Inputs, class BytesOf, class OneFormula>
NORMSCOPE_INLINE void apply_to_run(const Inputs inputs, const BytesOf& bytes_of,
                                   const OneFormula& one_of, std::int64_t n, Stores stores,
                                   Element* output) {
  constexpr std::int64_t kWidth = kElementsOf<Element>;
  if (n < kWidth) {
    for (std::int64_t i = 0; i < n; ++i) {
      output[i] = narrow<Element>(inputs.apply_to_one(one_of(i), i));
    }
    return;
  }
  std::int64_t i = elements_before_alignment(output);
  if (i > 0) store_bytes(output, bytes_of(0));
  if (stores == Stores::kStreaming) {
    for (; i + kWidth <= n; i += kWidth) stream_words(output + i, bytes_of(i));
  } else {
    for (; i + kWidth <= n; i += kWidth) store_bytes(output + i, bytes_of(i));
  }
  if (i < n) store_bytes(output + n - kWidth, bytes_of(n - kWidth));
}

// n neighbours of one channel.
template <class Element, class Inputs, class Formula>
NORMSCOPE_INLINE void apply_to_neighbours(const Inputs& inputs, const Formula& formula,
                                          std::int64_t n, Stores stores, Element* output) {
  const auto vector_formula = broadcast_formula(formula);
  apply_to_run(
      inputs,
      [=](std::int64_t i) { return narrow_block(inputs.apply_to_block(vector_formula, i)); },
      [=](std::int64_t) { return formula; }, n, stores, output);
}

// The channels of one position.
template <class Element, class Inputs, class Coefficients>
NORMSCOPE_INLINE void apply_to_channels(const Inputs& inputs, const Coefficients coefficients,
                                        std::int64_t channels, Stores stores, Element* output) {
  using Real = Arithmetic<Element>;
  const auto apply_from = [=](std::int64_t c) {
    return inputs.apply(formula_at<Vector<Real>>(coefficients, c), c);
  };
  const auto bytes_of = [=](std::int64_t c) {
    if constexpr (sizeof(Element) == 2) {
      return narrow_pair(static_cast<const Element*>(nullptr), apply_from(c),
                         apply_from(c + kFloats));
    } else {
      return reinterpret_cast<Words>(apply_from(c));
    }
  };
  apply_to_run(
      inputs, bytes_of, [=](std::int64_t c) { return formula_at<Real>(coefficients, c); }, channels,
      stores, output);
}

// Applies a formula to the tiles, last ones first; within a tile forwards, as the hardware expects
// it. inputs_at(n, c, p) gives the inputs there.
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
      for (std::int64_t p = tile.begin; p < tile.begin + tile.size; ++p) {
        apply_to_channels(inputs_at(n, 0, p), coefficients, y.channels, stores,
                          element_at<Element>(y, n, 0, p));
      }
    }
  }
  if (stores == Stores::kStreaming) finish_streaming();
}
