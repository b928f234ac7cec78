// SPDX-License-Identifier: Apache-2.0
//
// Sums of [N, C] inputs, where each element is a tile of its own. Included once by each target
// (vector.h says why).
//
// Such an element is its own pivot: x and x^2 go into the limbs as they are, dy and dy (x - mean)
// as the arithmetic's type holds them. One by one they would cost some twenty instructions an
// element; so up to 32 rows are added in float64 first, where a look at the largest and the
// smallest magnitude shows that these additions are exact as well.

inline constexpr std::int64_t kBlockRows = 32;

// Bits below the finest grid, 2^-100, are rounded away element by element, so that an element which
// has any may not be added to others first. The last bit of these numbers, and of their squares, is
// 2^-100.
inline constexpr float kLeastOnGrid = 0x1p-77F;
inline constexpr float kLeastWithSquareOnGrid = 0x1p-27F;

// Whether magnitudes span at most 2^24, zeros apart. The 24-bit significands then lie within 48
// bits, and 32 of them add up within the 53 of a float64.
class MagnitudeSpan {
 public:
  NORMSCOPE_INLINE void add(Floats value) {
    const Floats magnitude = reinterpret_cast<Floats>(reinterpret_cast<Words>(value) & 0x7FFFFFFFU);
    largest_ = magnitude > largest_ ? magnitude : largest_;
    const Floats nonzero = magnitude == 0.0F ? smallest_ : magnitude;
    smallest_ = nonzero < smallest_ ? nonzero : smallest_;
    not_finite_ += magnitude - magnitude;
  }

  // And none is below `least`.
  NORMSCOPE_INLINE bool is_narrow(float least) const {
    bool narrow = true;
    for (int i = 0; i < kFloats; ++i) {
      narrow = narrow && not_finite_[i] == 0.0F && smallest_[i] >= least &&
               smallest_[i] >= largest_[i] * 0x1p-24F;
    }
    return narrow;
  }

 private:
  Floats largest_ = {};
  Floats smallest_ = broadcast(0x1.fffffeP+127F);
  Floats not_finite_ = {};
};

// Columns of terms, widened to float64 half a vector at a time.
struct Columns {
  Floats rows[kBlockRows];

  NORMSCOPE_INLINE Doubles at(std::int64_t row, std::int64_t column) const {
    return load_as_doubles(reinterpret_cast<const float*>(rows + row) + column);
  }
};

NORMSCOPE_INLINE Doubles exact_sums(const Columns& terms, std::int64_t rows, std::int64_t column) {
  Doubles sum{};
  for (std::int64_t row = 0; row < rows; ++row) sum += terms.at(row, column);
  return sum;
}

// A square has 48 bits, and all of them lie within 96: what the sum of 32 loses to rounding is
// exact in a second float64.
NORMSCOPE_INLINE DoubleDouble<Doubles> exact_sums_of_squares(const Columns& terms,
                                                             std::int64_t rows,
                                                             std::int64_t column) {
  DoubleDouble<Doubles> sum{};
  for (std::int64_t row = 0; row < rows; ++row) {
    const Doubles value = terms.at(row, column);
    const DoubleDouble<Doubles> next = two_sum(sum.hi, value * value);
    sum = {next.hi, sum.lo + next.lo};
  }
  return sum;
}

template <class Element>
NORMSCOPE_INLINE void add_moments_one_by_one(const Element* x, std::int64_t row_stride,
                                             std::int64_t rows, const LimbsView& limbs) {
  for (std::int64_t row = 0; row < rows; ++row) {
    double values[kFloats];
    for (std::int64_t c = 0; c < limbs.channels; ++c) {
      values[c] = static_cast<double>(widen(x[row * row_stride + c]));
    }
    for_channels(limbs.channels, [&]<class Real>(std::int64_t c, Real) {
      const Real value = load_bytes<Real>(values + c);
      add_part(limbs, 0, c, value);
      add_part(limbs, 1, c, two_product(value, value));
    });
  }
}

template <class Element>
NORMSCOPE_INLINE void add_moments_of_block(const Element* x, std::int64_t row_stride,
                                           std::int64_t rows, const LimbsView& limbs) {
  if constexpr (sizeof(Element) < sizeof(double)) {
    if (limbs.channels == kFloats) {
      Columns columns;
      MagnitudeSpan span;
      for (std::int64_t row = 0; row < rows; ++row) {
        columns.rows[row] = load(x + row * row_stride);
        span.add(columns.rows[row]);
      }
      if (span.is_narrow(kLeastWithSquareOnGrid)) {
        for (std::int64_t c = 0; c < kFloats; c += kDoubles) {
          add_part(limbs, 0, c, exact_sums(columns, rows, c));
          add_part(limbs, 1, c, exact_sums_of_squares(columns, rows, c));
        }
        return;
      }
    }
  }
  add_moments_one_by_one(x, row_stride, rows, limbs);
}

template <class Element>
NORMSCOPE_INLINE void add_gradients_one_by_one(const GradientTerms<Element>& terms,
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
      add_part(limbs, 0, c, load_bytes<Real>(first + c));
      add_part(limbs, 1, c, load_bytes<Real>(second + c));
    });
  }
}

template <class Element>
NORMSCOPE_INLINE void add_gradients_of_block(const GradientTerms<Element>& terms,
                                             std::int64_t x_stride, std::int64_t dy_stride,
                                             std::int64_t rows, const Arithmetic<Element>* mean_hi,
                                             const LimbsView& limbs) {
  if constexpr (sizeof(Element) < sizeof(double)) {
    if (limbs.channels == kFloats) {
      Columns first;
      Columns second;
      MagnitudeSpan first_span;
      MagnitudeSpan second_span;
      const Floats mean = load(mean_hi);
      for (std::int64_t row = 0; row < rows; ++row) {
        const auto term = GradientTerms<Element>::of(load(terms.x + row * x_stride),
                                                     load(terms.dy + row * dy_stride), mean);
        first.rows[row] = term.first;
        second.rows[row] = term.second;
        first_span.add(term.first);
        second_span.add(term.second);
      }
      if (first_span.is_narrow(kLeastOnGrid) && second_span.is_narrow(kLeastOnGrid)) {
        for (std::int64_t c = 0; c < kFloats; c += kDoubles) {
          add_part(limbs, 0, c, exact_sums(first, rows, c));
          add_part(limbs, 1, c, exact_sums(second, rows, c));
        }
        return;
      }
    }
  }
  add_gradients_one_by_one(terms, x_stride, dy_stride, rows, mean_hi, limbs);
}

// Calls add(n, rows, c, limbs of the channels from c on) for blocks of rows and channels.
template <class Add>
NORMSCOPE_INLINE void for_element_blocks(TileRange samples, const LimbsView& limbs,
                                         const Add& add) {
  for (std::int64_t n = samples.begin; n < samples.end; n += kBlockRows) {
    const std::int64_t rows = smaller(kBlockRows, samples.end - n);
    for (std::int64_t c = 0; c < limbs.channels; c += kFloats) {
      add(n, rows, c, limbs.channel_range(c, smaller(c + kFloats, limbs.channels)));
    }
  }
}

template <class Element>
void add_moments_of_elements(const TensorView& x, TileRange samples, LimbsView limbs) {
  for_element_blocks(
      samples, limbs, [&](std::int64_t n, std::int64_t rows, std::int64_t c, LimbsView block) {
        add_moments_of_block(element_at<Element>(x, n, c, 0), x.sample_stride, rows, block);
      });
  canonicalize_limbs(limbs);
}

template <class Element>
void add_gradient_sums_of_elements(const TensorView& x, const TensorView& dy,
                                   const Arithmetic<Element>* mean_hi, TileRange samples,
                                   LimbsView limbs) {
  for_element_blocks(
      samples, limbs, [&](std::int64_t n, std::int64_t rows, std::int64_t c, LimbsView block) {
        const GradientTerms<Element> terms{element_at<Element>(x, n, c, 0),
                                           element_at<Element>(dy, n, c, 0)};
        add_gradients_of_block(terms, x.sample_stride, dy.sample_stride, rows, mean_hi + c, block);
      });
  canonicalize_limbs(limbs);
}
