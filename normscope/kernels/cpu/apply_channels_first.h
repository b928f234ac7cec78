// SPDX-License-Identifier: Apache-2.0
//
// Applies formulas to tensors with contiguous positions. Included once by each target (vector.h
// says why).

// Applies the formula to n contiguous elements of one channel.
template <class Element, class Inputs, class Formula, class Store>
NORMSCOPE_INLINE void apply_to_neighbours(const Inputs inputs, const Formula formula,
                                          std::int64_t n, const Store& store, Element* output) {
  if (n < kElementsOf<Element>) {
    for (std::int64_t i = 0; i < n; ++i) {
      const auto load_one = [i](const Element* from) { return widen(from[i]); };
      output[i] = narrow<Element>(inputs.value(formula, load_one));
    }
    return;
  }
  const auto vector_formula = broadcast_formula(formula);
  store_vectors(output, n, store, [=](std::int64_t i) {
    Block<Element> result;
    for (int v = 0; v < kBlockVectors<Element>; ++v) {
      const auto load_vector = [=](const Element* from) { return load_block(from + i).vectors[v]; };
      result.vectors[v] = inputs.value(vector_formula, load_vector);
    }
    return narrow_block(result);
  });
}

// inputs_at(n, c, p) returns the inputs at that place.
template <class Element, class InputsAt, class Formulas, class Store>
NORMSCOPE_INLINE void apply_channels_first(const InputsAt& inputs_at, const Formulas& formulas,
                                           TileRange tiles, const Store& store,
                                           const MutableTensorView& y) {
  for_samples_backwards(
      Layout::kChannelsFirst, y.positions, tiles,
      [&](std::int64_t n, std::int64_t begin, std::int64_t end) {
        for (std::int64_t c = 0; c < y.channels; ++c) {
          apply_to_neighbours(inputs_at(n, c, begin), formula_at<Arithmetic<Element>>(formulas, c),
                              end - begin, store, element_at<Element>(y, n, c, begin));
        }
      });
}
