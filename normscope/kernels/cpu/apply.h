// SPDX-License-Identifier: Apache-2.0
//
// Applies formulas to tensors. Included once by each target (vector.h says why).

// The inputs of a formula at one place. value(formula, load) returns the result; load(tensor)
// returns the tensor's element at that place, or a vector of elements.
template <class Element>
struct OneInput {
  const Element* x;

  template <class Formula, class Load>
  NORMSCOPE_INLINE auto value(const Formula& formula, const Load& load) const {
    return formula(load(x));
  }
};

template <class Element>
struct TwoInputs {
  const Element* x;
  const Element* dy;

  template <class Formula, class Load>
  NORMSCOPE_INLINE auto value(const Formula& formula, const Load& load) const {
    return formula(load(x), load(dy));
  }
};

inline constexpr auto kStoreCached = [](void* to, Words words) { store_bytes(to, words); };
inline constexpr auto kStoreStreaming = [](void* to, Words words) { stream_words(to, words); };

// Stores words_at(i) for i from 0 to n, one vector of Elements at a time. Whole aligned vectors go
// through `store`, which is one of the above. The ends are covered by unaligned vectors that
// overlap them; these write some elements twice, which is why an output must not also be an input.
// n is at least one vector.
template <class Element, class Store, class WordsAt>
NORMSCOPE_INLINE void store_vectors(Element* output, std::int64_t n, const Store& store,
                                    const WordsAt& words_at) {
  constexpr std::int64_t kWidth = kElementsOf<Element>;
  std::int64_t i = elements_before_alignment(output);
  if (i > 0) store_bytes(output, words_at(0));
  for (; i + kWidth <= n; i += kWidth) store(output + i, words_at(i));
  if (i < n) store_bytes(output + n - kWidth, words_at(n - kWidth));
}

// Calls apply(sample, begin, end) for the positions of the tiles, sample by sample. The last
// samples come first, because the previous sweep has left them in the cache. Positions within a
// sample go forwards, which suits the hardware prefetcher.
template <class Apply>
NORMSCOPE_INLINE void for_samples_backwards(Layout layout, std::int64_t positions, TileRange tiles,
                                            const Apply& apply) {
  const std::int64_t tile_size = tile_shape(layout).positions;
  const std::int64_t per_sample = tiles_per_sample(layout, positions);
  for (std::int64_t end = tiles.end; end > tiles.begin;) {
    const std::int64_t sample = (end - 1) / per_sample;
    const std::int64_t first_of_sample = sample * per_sample;
    const std::int64_t begin = larger(tiles.begin, first_of_sample);
    apply(sample, (begin - first_of_sample) * tile_size,
          smaller((end - first_of_sample) * tile_size, positions));
    end = begin;
  }
}

// Contiguous positions.

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

// Contiguous channels.

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
