// SPDX-License-Identifier: Apache-2.0
//
// Applies formulas to tensors with contiguous channels. Included once by each target (vector.h says
// why).

// Applies the formulas to all channels of one position.
template <class Element, class Inputs, class Formulas, class Store>
NORMSCOPE_INLINE void apply_to_row(const Inputs inputs, const Formulas& formulas,
                                   std::int64_t channels, const Store& store, Element* output) {
  using Real = Arithmetic<Element>;
  if (channels < kElementsOf<Element>) {
    for (std::int64_t c = 0; c < channels; ++c) {
      const auto load_one = [c](const Element* from) { return widen(from[c]); };
      output[c] = narrow<Element>(inputs.value(formula_at<Real>(formulas, c), load_one));
    }
    return;
  }
  store_vectors(output, channels, store, [=](std::int64_t c) {
    Block<Element> result;
    for (int v = 0; v < kBlockVectors<Element>; ++v) {
      const std::int64_t begin = c + v * kLanesOf<Real>;
      const auto load_vector = [begin](const Element* from) { return load(from + begin); };
      result.vectors[v] = inputs.value(formula_at<Vector<Real>>(formulas, begin), load_vector);
    }
    return narrow_in_order<Element>(result);
  });
}

// The size of a run of an input in bytes. A run is read forwards, which suits the hardware
// prefetcher. Half of an L2 cache, where the previous sweep has left the last elements.
inline constexpr std::int64_t kRun = std::int64_t{1} << 19;

// inputs_at(n, c, p) returns the inputs at that place.
template <class Element, class InputsAt, class Formulas, class Store>
NORMSCOPE_INLINE void apply_channels_last(const InputsAt& inputs_at, const Formulas& formulas,
                                          TileRange tiles, const Store& store,
                                          const MutableTensorView& y) {
  const std::int64_t row = y.channels * static_cast<std::int64_t>(sizeof(Element));
  const std::int64_t rows_of_run = larger(1, kRun / row);
  for_samples_backwards(Layout::kChannelsLast, y.positions, tiles,
                        [&](std::int64_t n, std::int64_t begin, std::int64_t end) {
                          while (end > begin) {
                            const std::int64_t first = larger(begin, end - rows_of_run);
                            for (std::int64_t p = first; p < end; ++p) {
                              apply_to_row(inputs_at(n, 0, p), formulas, y.channels, store,
                                           element_at<Element>(y, n, 0, p));
                            }
                            end = first;
                          }
                        });
}
