// SPDX-License-Identifier: Apache-2.0
//
// Sums of [N, C] inputs, where each element is a tile of its own. Included once by each target
// (vector.h says why).
//
// Such an element is its own pivot: x and x^2 go into the limbs as they are, dy and dy (x - mean)
// as the arithmetic's type holds them. One by one they would cost some twenty instructions an
// element; so the rows of a block are added in float64 first, where the largest and the smallest
// magnitude show that these additions are exact as well.

// More rows share the limbs' cost, but are exact less often: above all products, which span more.
inline constexpr int kMomentRows = 64;
inline constexpr int kGradientRows = 32;

// Bits below the finest grid, 2^-100, are rounded away element by element, so that an element which
// has any may not be added to others first. The last bit of these numbers, and of their squares, is
// 2^-100.
inline constexpr float kLeastOnGrid = 0x1p-77F;
inline constexpr float kLeastWithSquareOnGrid = 0x1p-27F;

// Significands of 24 bits whose magnitudes span at most this lie within 46 bits, or 47, and as many
// of them as a block has rows add up within the 53 of a float64.
inline constexpr float kSpanOfMoments = 0x1p22F;
inline constexpr float kSpanOfGradients = 0x1p23F;

// The largest and the smallest magnitude of each channel of a block, zeros apart. Magnitudes are
// compared as integers, which order them alike.
class MagnitudeSpan {
 public:
  NORMSCOPE_INLINE void add(Floats value) {
    const Words magnitude = reinterpret_cast<Words>(value) & kMagnitude;
    largest_ = max(largest_, reinterpret_cast<Integers>(magnitude));
    smallest_ = min(smallest_, reinterpret_cast<Integers>(magnitude + kZeroIsLargest));
  }

  // Whether all are finite, none is below `least`, and the largest is at most `span` times the
  // smallest.
  NORMSCOPE_INLINE bool is_narrow(float least, float span) const {
    const Floats largest = reinterpret_cast<Floats>(largest_);
    const Floats smallest =
        reinterpret_cast<Floats>(reinterpret_cast<Words>(smallest_) - kZeroIsLargest);
    const Integers narrow =
        (largest - largest == 0.0F) &
        (((smallest >= least) & (smallest * span >= largest)) | (largest == 0.0F));
    return all_set(reinterpret_cast<Words>(narrow));
  }

  // The largest magnitudes of half the channels.
  NORMSCOPE_INLINE Doubles largest(int half) const {
    return load_as_doubles(reinterpret_cast<const float*>(&largest_) + half * kDoubles);
  }

 private:
  typedef std::int32_t Integers __attribute__((vector_size(kVectorBytes)));

  static constexpr std::uint32_t kMagnitude = 0x7FFFFFFFU;
  static constexpr std::uint32_t kZeroIsLargest = 0x7FFFFFFFU;  // all others wrap to below zero

  static NORMSCOPE_INLINE Integers max(Integers a, Integers b) { return a > b ? a : b; }
  static NORMSCOPE_INLINE Integers min(Integers a, Integers b) { return a < b ? a : b; }

  Integers largest_ = {};
  Integers smallest_ = Integers{} + 0x7FFFFFFF;
};

// A sum in float64, and the span that tells afterwards whether it is exact.
struct SumWithSpan {
  WideHalves halves;
  MagnitudeSpan span;

  // Returns the term widened.
  NORMSCOPE_INLINE WideHalves add(Floats term) {
    const WideHalves widened = wide_halves(term);
    span.add(term);
    for (int half = 0; half < 2; ++half) halves.of[half] += widened.of[half];
    return widened;
  }
};

// A block is a cache line of channels wide, since rows lie far apart, and all of what is fetched
// should be used; but two vectors at most, as many as have sums in registers. Where so many
// channels are not left, it is one vector wide.
template <class Element>
inline constexpr int kVectorsOfBlock = kLineElements<Element> < 2 * kFloats ? 1 : 2;

// Terms by row and vector of channels.
template <int kVectors>
struct Columns {
  Floats rows[kMomentRows][kVectors];

  // Widened to float64 half a vector at a time.
  NORMSCOPE_INLINE Doubles at(std::int64_t row, int v, int half) const {
    return load_as_doubles(reinterpret_cast<const float*>(&rows[row][v]) + half * kDoubles);
  }
};

// A power of two that is more than the sum of a block's squares of numbers up to `largest`, so that
// a float64 sum which begins with it stays below its double.
NORMSCOPE_INLINE Doubles base_of_squares(Doubles largest) {
  typedef std::uint64_t LongWords __attribute__((vector_size(kVectorBytes)));
  constexpr std::uint64_t kExponent = 0x7FF0000000000000U;
  const Doubles square = largest * largest;
  return reinterpret_cast<Doubles>(reinterpret_cast<LongWords>(square) & kExponent) * 0x1p8;
}

// A square has 48 bits, and all of them lie within 92, which is more than a float64 holds. A sum
// that begins with a base keeps of every square the same upper bits; the lower ones, exact in a
// float64 themselves, have a sum of their own. With k the exponent of the largest square: the base
// is 2^(k+8), its last bit 2^(k-44), what it leaves of 64 squares at most 2^(k-39), and their last
// bit 2^(k-91) or above.
struct ExactMoments {
  WideHalves sum;
  WideHalves upper_squares;
  WideHalves lower_squares;
};
template <int kVectors>
NORMSCOPE_INLINE ExactMoments exact_moments(const Columns<kVectors>& terms, std::int64_t rows,
                                            int v, const MagnitudeSpan& span) {
  const Doubles base[2] = {base_of_squares(span.largest(0)), base_of_squares(span.largest(1))};
  WideHalves sum;
  Doubles upper[2] = {base[0], base[1]};
  WideHalves lower;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (int half = 0; half < 2; ++half) {
      const Doubles value = terms.at(row, v, half);
      const Doubles next = add_exact_product(value, value, upper[half]);
      sum.of[half] += value;
      lower.of[half] += add_exact_product(value, value, upper[half] - next);
      upper[half] = next;
    }
  }
  return {sum, {upper[0] - base[0], upper[1] - base[1]}, lower};
}

// Out of line: seldom needed, and large.
template <class Element>
[[gnu::noinline]] void add_moments_one_by_one(const Element* x, std::int64_t row_stride,
                                              std::int64_t rows, const LimbsView& limbs) {
  for (std::int64_t row = 0; row < rows; ++row) {
    double values[kFloats];
    for (std::int64_t c = 0; c < limbs.channels; ++c) {
      values[c] = static_cast<double>(widen(x[row * row_stride + c]));
    }
    for_channels(limbs.channels, [&]<class Real>(std::int64_t c, Real) {
      const Real value = load_bytes<Real>(values + c);
      add_part(limbs, kSumOfValues, c, value);
      add_part(limbs, kSumOfProducts, c, two_product(value, value));
    });
  }
}

// kVectors vectors of channels.
template <int kVectors, class Element>
NORMSCOPE_INLINE void add_moments_of_block(const Element* x, std::int64_t row_stride,
                                           std::int64_t rows, const LimbsView& limbs) {
  Columns<kVectors> columns;
  MagnitudeSpan spans[kVectors];
  for (std::int64_t row = 0; row < rows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      columns.rows[row][v] = load(x + row * row_stride + v * kFloats);
      spans[v].add(columns.rows[row][v]);
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const LimbsView of_vector = limbs.channel_range(v * kFloats, (v + 1) * kFloats);
    if (!spans[v].is_narrow(kLeastWithSquareOnGrid, kSpanOfMoments)) {
      add_moments_one_by_one(x + v * kFloats, row_stride, rows, of_vector);
      continue;
    }
    const ExactMoments moments = exact_moments(columns, rows, v, spans[v]);
    add_halves(of_vector, kSumOfValues, moments.sum);
    add_halves(of_vector, kSumOfProducts, moments.upper_squares);
    add_halves(of_vector, kSumOfProducts, moments.lower_squares);
  }
}

template <class Element>
[[gnu::noinline]] void add_gradients_one_by_one(const GradientTerms<Element>& terms,
                                                std::int64_t x_stride, std::int64_t dy_stride,
                                                std::int64_t rows,
                                                const Arithmetic<Element>* mean_hi,
                                                const LimbsView& limbs) {
  for (std::int64_t row = 0; row < rows; ++row) {
    const GradientTerms<Element> at_row{terms.x + row * x_stride, terms.dy + row * dy_stride};
    double first[kFloats];
    double second[kFloats];
    for (std::int64_t c = 0; c < limbs.channels; ++c) {
      const auto term = at_row.scalar_at(c, mean_hi[c]);
      first[c] = static_cast<double>(term.first);
      second[c] = static_cast<double>(term.second);
      if (!is_finite(first[c] + second[c])) {
        second[c] = at_row.scalar_at(c, static_cast<double>(mean_hi[c])).second;
      }
    }
    for_channels(limbs.channels, [&]<class Real>(std::int64_t c, Real) {
      add_part(limbs, kSumOfValues, c, load_bytes<Real>(first + c));
      add_part(limbs, kSumOfProducts, c, load_bytes<Real>(second + c));
    });
  }
}

template <int kVectors, class Element>
NORMSCOPE_INLINE void add_gradients_of_block(const GradientTerms<Element>& terms,
                                             std::int64_t x_stride, std::int64_t dy_stride,
                                             std::int64_t rows, const float* mean_hi,
                                             const LimbsView& limbs) {
  SumWithSpan first[kVectors];
  SumWithSpan second[kVectors];
  for (std::int64_t row = 0; row < rows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t c = v * kFloats;
      const auto term =
          GradientTerms<Element>::of(load(terms.x + row * x_stride + c),
                                     load(terms.dy + row * dy_stride + c), load(mean_hi + c));
      first[v].add(term.first);
      second[v].add(term.second);
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t begin = v * kFloats;
    const LimbsView of_vector = limbs.channel_range(begin, begin + kFloats);
    if (!first[v].span.is_narrow(kLeastOnGrid, kSpanOfGradients) ||
        !second[v].span.is_narrow(kLeastOnGrid, kSpanOfGradients)) {
      add_gradients_one_by_one(GradientTerms<Element>{terms.x + begin, terms.dy + begin}, x_stride,
                               dy_stride, rows, mean_hi + begin, of_vector);
      continue;
    }
    add_halves(of_vector, kSumOfValues, first[v].halves);
    add_halves(of_vector, kSumOfProducts, second[v].halves);
  }
}

// Calls add(terms, rows, c, limbs of the channels from c on, vectors) for blocks of rows and
// channels. terms_at(n, c) are the terms from sample n and channel c on. `vectors` is a constant:
// how many vectors of channels the block has, or 0 for fewer than one.
template <class Element, int kRows, class TermsAt, class Add>
NORMSCOPE_INLINE void for_element_blocks(TileRange samples, const LimbsView& limbs,
                                         const TermsAt& terms_at, const Add& add) {
  for (std::int64_t n = samples.begin; n < samples.end; n += kRows) {
    const std::int64_t rows = smaller(kRows, samples.end - n);
    std::int64_t c = 0;
    const auto add_while_fitting =
        [&]<int kVectors>(std::integral_constant<int, kVectors> vectors) {
          constexpr std::int64_t kChannels = kVectors > 0 ? kVectors * kFloats : kFloats;
          const std::int64_t least = kVectors > 0 ? kChannels : 1;
          while (c + least <= limbs.channels) {
            const std::int64_t end = smaller(c + kChannels, limbs.channels);
            add(terms_at(n, c), rows, c, limbs.channel_range(c, end), vectors);
            c = end;
          }
        };
    if constexpr (sizeof(Element) < sizeof(double)) {
      add_while_fitting(std::integral_constant<int, kVectorsOfBlock<Element>>{});
      add_while_fitting(std::integral_constant<int, 1>{});
    }
    add_while_fitting(std::integral_constant<int, 0>{});
  }
}

template <class Element>
void add_moments_of_elements(const TensorView& x, TileRange samples, LimbsView limbs) {
  using TheTerms = MomentTerms<Element>;
  const auto terms_at = [&](std::int64_t n, std::int64_t c) {
    return TheTerms{element_at<Element>(x, n, c, 0)};
  };
  const auto add = [&]<int kVectors>(const TheTerms& terms, std::int64_t rows, std::int64_t,
                                     const LimbsView& block,
                                     std::integral_constant<int, kVectors>) {
    if constexpr (kVectors > 0) {
      add_moments_of_block<kVectors>(terms.x, x.sample_stride, rows, block);
    } else {
      add_moments_one_by_one(terms.x, x.sample_stride, rows, block);
    }
  };
  for_element_blocks<Element, kMomentRows>(samples, limbs, terms_at, add);
  canonicalize_limbs(limbs);
}

template <class Element>
void add_gradient_sums_of_elements(const TensorView& x, const TensorView& dy,
                                   const Arithmetic<Element>* mean_hi, TileRange samples,
                                   LimbsView limbs) {
  using TheTerms = GradientTerms<Element>;
  const auto terms_at = [&](std::int64_t n, std::int64_t c) {
    return TheTerms{element_at<Element>(x, n, c, 0), element_at<Element>(dy, n, c, 0)};
  };
  const auto add = [&]<int kVectors>(const TheTerms& terms, std::int64_t rows, std::int64_t c,
                                     const LimbsView& block,
                                     std::integral_constant<int, kVectors>) {
    if constexpr (kVectors > 0) {
      add_gradients_of_block<kVectors>(terms, x.sample_stride, dy.sample_stride, rows, mean_hi + c,
                                       block);
    } else {
      add_gradients_one_by_one(terms, x.sample_stride, dy.sample_stride, rows, mean_hi + c, block);
    }
  };
  for_element_blocks<Element, kGradientRows>(samples, limbs, terms_at, add);
  canonicalize_limbs(limbs);
}
