// SPDX-License-Identifier: Apache-2.0
//
// Sums of [N, C] inputs, in which each element is its own tile. Included once by each target
// (vector.h says why).
//
// Each element is its own pivot: x and x^2 go into the limbs unrounded, dy and dy (x - mean)
// rounded to the type of the arithmetic. One at a time, this would take some twenty instructions
// per element. The rows of a block are therefore first added in float64, if the largest and the
// smallest magnitude prove that these additions are exact.

// More rows share the cost of the limbs, but are exact less often, above all for products, whose
// magnitudes span more.
inline constexpr int kMomentRows = 64;
inline constexpr int kGradientRows = 32;

// Bits below the finest grid, 2^-100, are rounded away element by element. An element with such
// bits must not be added to others first. These are the smallest numbers whose last bit, or the
// last bit of whose square, is 2^-100.
inline constexpr float kLeastOnGrid = 0x1p-77F;
inline constexpr float kLeastWithSquareOnGrid = 0x1p-27F;

// 24-bit significands whose magnitudes differ by at most these factors fit within 46 or 47 bits. As
// many of them as a block has rows then add up within the 53 bits of a float64.
inline constexpr float kSpanOfMoments = 0x1p22F;
inline constexpr float kSpanOfGradients = 0x1p23F;

// The largest and the smallest nonzero magnitude of each channel of a block. Magnitudes are
// compared as integers, which gives the same order.
class MagnitudeSpan {
 public:
  NORMSCOPE_INLINE void add(Floats value) {
    const Words magnitude = reinterpret_cast<Words>(value) & kMagnitude;
    largest_ = max(largest_, reinterpret_cast<Integers>(magnitude));
    smallest_ = min(smallest_, reinterpret_cast<Integers>(magnitude + kZeroIsLargest));
  }

  // Whether all magnitudes are finite, none is below `least`, and the largest is at most `span`
  // times the smallest. Zeros are ignored.
  NORMSCOPE_INLINE bool is_narrow(float least, float span) const {
    const Floats largest = reinterpret_cast<Floats>(largest_);
    const Floats smallest =
        reinterpret_cast<Floats>(reinterpret_cast<Words>(smallest_) - kZeroIsLargest);
    const Integers narrow =
        (largest - largest == 0.0F) &
        (((smallest >= least) & (smallest * span >= largest)) | (largest == 0.0F));
    return all_set(reinterpret_cast<Words>(narrow));
  }

  // The largest magnitudes, in two halves of the channels.
  NORMSCOPE_INLINE WideHalves largest() const {
    return wide_halves(reinterpret_cast<Floats>(largest_));
  }

 private:
  typedef std::int32_t Integers __attribute__((vector_size(kVectorBytes)));

  static constexpr std::uint32_t kMagnitude = 0x7FFFFFFFU;
  static constexpr std::uint32_t kZeroIsLargest = 0x7FFFFFFFU;  // all others become negative

  static NORMSCOPE_INLINE Integers max(Integers a, Integers b) { return a > b ? a : b; }
  static NORMSCOPE_INLINE Integers min(Integers a, Integers b) { return a < b ? a : b; }

  Integers largest_ = {};
  Integers smallest_ = Integers{} + 0x7FFFFFFF;
};

// A sum in float64, and the span of its terms, which tells whether the sum is exact.
struct SumWithSpan {
  WideHalves halves;
  MagnitudeSpan span;

  NORMSCOPE_INLINE void add(Floats term) {
    const WideHalves widened = wide_halves(term);
    span.add(term);
    for (int half = 0; half < 2; ++half) halves.of[half] += widened.of[half];
  }
};

// A power of two that exceeds the sum of a block's squares of numbers up to `largest`. A float64
// sum that starts with it stays below twice its value.
NORMSCOPE_INLINE Doubles base_of_squares(Doubles largest) {
  constexpr std::uint64_t kExponent = 0x7FF0000000000000U;
  const Doubles square = largest * largest;
  return reinterpret_cast<Doubles>(reinterpret_cast<LongWords>(square) & kExponent) * 0x1p8;
}

// A square has 48 bits, and all squares of a block fit within 92 bits, more than a float64 holds. A
// sum that starts with a base keeps the same upper bits of every square. The remaining lower bits
// are exact in a float64 and get a sum of their own. With k the exponent of the largest square: the
// base is 2^(k+8), and its last bit is 2^(k-44). The lower bits of 64 squares add up to at most
// 2^(k-39), and their last bit is 2^(k-91) or above.
//
// Calls use(v, are_exact, sum, upper, lower) for each vector v of channels of a block.
template <int kVectors, class Element, class Use>
NORMSCOPE_INLINE void sum_block(const MomentRun<Element>& run, std::int64_t rows,
                                const float* /*means*/, const Use& use) {
  // A copy of the rows, side by side.
  alignas(kVectorBytes) float values[kMomentRows][kVectors][kFloats];
  MagnitudeSpan spans[kVectors];
  for (std::int64_t row = 0; row < rows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      const Floats value = load(run.at(row, v * kFloats).x);
      store_bytes(values[row][v], value);
      spans[v].add(value);
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const bool are_exact = spans[v].is_narrow(kLeastWithSquareOnGrid, kSpanOfMoments);
    const WideHalves largest = spans[v].largest();
    const Doubles base[2] = {base_of_squares(largest.of[0]), base_of_squares(largest.of[1])};
    WideHalves sum;
    WideHalves lower;
    Doubles upper[2] = {base[0], base[1]};
    for (std::int64_t row = 0; row < rows; ++row) {
      for (int half = 0; half < 2; ++half) {
        const auto value = load_wide<Doubles>(values[row][v] + half * kDoubles);
        const Doubles next = add_exact_product(value, value, upper[half]);
        sum.of[half] += value;
        lower.of[half] += add_exact_product(value, value, upper[half] - next);
        upper[half] = next;
      }
    }
    use(v, are_exact, sum, WideHalves{{upper[0] - base[0], upper[1] - base[1]}}, lower);
  }
}

// The same for dy and dy (x - mean), whose sums have no lower part.
template <int kVectors, class Element, class Gradient, class Use>
NORMSCOPE_INLINE void sum_block(const GradientRun<Element, Gradient>& run, std::int64_t rows,
                                const float* means, const Use& use) {
  SumWithSpan values[kVectors];
  SumWithSpan products[kVectors];
  for (std::int64_t row = 0; row < rows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      const auto term = run.at(row, v * kFloats).terms(kLoadVector, load(means + v * kFloats));
      values[v].add(term.first);
      products[v].add(term.second);
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const bool are_exact = values[v].span.is_narrow(kLeastOnGrid, kSpanOfGradients) &&
                           products[v].span.is_narrow(kLeastOnGrid, kSpanOfGradients);
    use(v, are_exact, values[v].halves, products[v].halves, WideHalves{});
  }
}

// Adds the channels [begin, end), at most a vector's width, one element at a time. Out of line
// because it is rarely needed, and large.
template <class AnyTerms>
[[gnu::noinline]] void add_one_by_one(const AnyTerms& terms, TileRange samples, std::int64_t begin,
                                      std::int64_t end, const LimbsView& limbs) {
  using Real = typename AnyTerms::Run::Real;
  const Real* means = terms.means_from(begin);
  auto run = terms.run(samples.begin, begin, 0);
  for (std::int64_t n = samples.begin; n < samples.end; ++n, run = run.at(1, 0)) {
    double first[kFloats];
    double second[kFloats];
    for (std::int64_t c = 0; c < end - begin; ++c) {
      const auto element = run.at(0, c);
      if constexpr (AnyTerms::kHasPivot) {
        first[c] = kLoadOne<double>(element.x);
      } else {
        const Terms<Real> term = element.terms(kLoadOne<Real>, means[c]);
        first[c] = static_cast<double>(term.first);
        second[c] = static_cast<double>(term.second);
        if (is_finite(first[c] + second[c])) continue;
        second[c] = element.terms(kLoadOne<double>, static_cast<double>(means[c])).second;
      }
    }
    for_channels(end - begin, [&]<class Value>(std::int64_t c, Value) {
      const auto value = load_bytes<Value>(first + c);
      add_part(limbs, kSumOfValues, begin + c, value);
      if constexpr (AnyTerms::kHasPivot) {
        add_part(limbs, kSumOfProducts, begin + c, two_product(value, value));
      } else {
        add_part(limbs, kSumOfProducts, begin + c, load_bytes<Value>(second + c));
      }
    });
  }
}

NORMSCOPE_INLINE void add_halves(const LimbsView& limbs, int sum, std::int64_t c,
                                 const WideHalves& parts) {
  for (int half = 0; half < 2; ++half) add_part(limbs, sum, c + half * kDoubles, parts.of[half]);
}

// Adds kVectors vectors of channels, starting at `begin`.
template <int kVectors, class AnyTerms>
NORMSCOPE_INLINE void add_block(const AnyTerms& terms, TileRange samples, std::int64_t begin,
                                const LimbsView& limbs) {
  const auto add_vector = [&](int v, bool are_exact, const WideHalves& values,
                              const WideHalves& products, const WideHalves& lower_products) {
    const std::int64_t c = begin + v * kFloats;
    if (!are_exact) {
      add_one_by_one(terms, samples, c, c + kFloats, limbs);
      return;
    }
    add_halves(limbs, kSumOfValues, c, values);
    add_halves(limbs, kSumOfProducts, c, products);
    if constexpr (AnyTerms::kHasPivot) add_halves(limbs, kSumOfProducts, c, lower_products);
  };
  sum_block<kVectors>(terms.run(samples.begin, begin, 0), samples.end - samples.begin,
                      terms.means_from(begin), add_vector);
}

template <class AnyTerms>
void add_sums_of_elements(const AnyTerms& terms, TileRange samples, LimbsView limbs) {
  using Run = typename AnyTerms::Run;
  constexpr std::int64_t kRows = AnyTerms::kHasPivot ? kMomentRows : kGradientRows;
  // A block is one cache line of channels wide: rows are far apart in memory, and all that is
  // fetched should be used. It is at most two vectors wide, because more sums do not fit the
  // registers. Remaining channels are taken one vector at a time.
  constexpr int kVectors = kLineElements<typename Run::ElementType> < 2 * kFloats ? 1 : 2;
  constexpr std::int64_t kWidth = kVectors * kFloats;
  for (std::int64_t n = samples.begin; n < samples.end; n += kRows) {
    const TileRange rows{n, smaller(n + kRows, samples.end)};
    std::int64_t c = 0;
    if constexpr (std::is_same_v<typename Run::Real, float>) {
      for (; c + kWidth <= limbs.channels; c += kWidth) add_block<kVectors>(terms, rows, c, limbs);
      for (; c + kFloats <= limbs.channels; c += kFloats) add_block<1>(terms, rows, c, limbs);
    }
    for (; c < limbs.channels; c += kFloats) {
      add_one_by_one(terms, rows, c, smaller(c + kFloats, limbs.channels), limbs);
    }
  }
}
