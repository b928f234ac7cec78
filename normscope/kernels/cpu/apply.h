// SPDX-License-Identifier: Apache-2.0
//
// Shared by the sweeps that apply formulas. Included once by each target (vector.h says why).

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
