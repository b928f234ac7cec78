// SPDX-License-Identifier: Apache-2.0
//
// The tiles of a tensor: their places, and the terms of their two sums, per element. Included once
// by each target (vector.h says why).
//
// Terms belong to one tensor or to two. Their run(n, c, p) is a view of the elements from that
// place on, in rows. A row is a position, or a sample if each sample has one position.

// The place of a tile.
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

NORMSCOPE_INLINE std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
NORMSCOPE_INLINE std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

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

template <class Value>
struct Terms {
  Value first;
  Value second;

  NORMSCOPE_INLINE Terms operator+(const Terms& other) const {
    return {first + other.first, second + other.second};
  }
};

NORMSCOPE_INLINE std::int64_t row_stride(const TensorView& x) {
  return x.positions == 1 ? x.sample_stride : x.position_stride;
}

// How runs load: a vector of contiguous elements, a block of them, or one element as a Value.
inline constexpr auto kLoadVector = [](const auto* from) { return load(from); };
inline constexpr auto kLoadBlock = [](const auto* from) { return load_block(from); };
template <class Value>
inline constexpr auto kLoadOne = [](const auto* from) { return static_cast<Value>(widen(*from)); };

// x - a and (x - a)^2
template <class Element>
struct MomentRun {
  using ElementType = Element;
  using Real = Arithmetic<Element>;
  static constexpr int kInputs = 1;
  const Element* x;
  std::int64_t x_stride;

  NORMSCOPE_INLINE MomentRun at(std::int64_t row, std::int64_t i) const {
    return {x + row * x_stride + i, x_stride};
  }
  // The same run with its inputs copied to other memory, in which rows are a vector's width of
  // elements apart. copy(input, stride) copies an input and returns its new address.
  template <class Copy>
  NORMSCOPE_INLINE MomentRun copied(const Copy& copy) const {
    return {copy(x, x_stride), kLanesOf<Real>};
  }
  NORMSCOPE_INLINE void prefetch_line() const { prefetch(x); }

  template <class Load, class Value>
  NORMSCOPE_INLINE Terms<Value> terms(const Load& load, Value pivot) const {
    return of(load(x), pivot);
  }
  // Calls use(v, terms) for each vector v of a block.
  template <class LoadBlock, class Use>
  NORMSCOPE_INLINE void for_block(const LoadBlock& load_block, Vector<Real> pivot,
                                  const Use& use) const {
    const Block<Element> block = load_block(x);
    for (int v = 0; v < kBlockVectors<Element>; ++v) use(v, of(block.vectors[v], pivot));
  }

 private:
  template <class Value>
  static NORMSCOPE_INLINE Terms<Value> of(Value x, Value pivot) {
    const Value centered = subtract(x, pivot);
    return {centered, centered * centered};
  }
};

template <class Element>
struct MomentTerms {
  using Run = MomentRun<Element>;
  static constexpr bool kHasPivot = true;
  const TensorView& x;

  [[nodiscard]] static constexpr const Arithmetic<Element>* means_from(std::int64_t /*c*/) {
    return nullptr;
  }
  NORMSCOPE_INLINE Run run(std::int64_t n, std::int64_t c, std::int64_t p) const {
    return {element_at<Element>(x, n, c, p), row_stride(x)};
  }
};

// The gradient whose sums are computed: dy itself.
struct OutputGradient {
  [[nodiscard]] constexpr OutputGradient from(std::int64_t /*c*/) const { return *this; }
  [[nodiscard]] constexpr OutputGradient at(std::int64_t /*i*/) const { return *this; }

  template <class Value>
  NORMSCOPE_INLINE Value operator()(Value /*x*/, Value dy) const {
    return dy;
  }
};

// Or dz = dy * activation'(z), where z is the formula of y applied to x. If channels are
// contiguous, the coefficients are vectors, as x is; in a plane, all elements have the same
// coefficients.
template <class Element, Layout kLayout>
struct ActivatedOutputGradient {
  using Real = Arithmetic<Element>;
  FormulaArrays<Normalize, Real> formulas;  // starting at x's channel
  Clip<Real> function;

  NORMSCOPE_INLINE ActivatedOutputGradient from(std::int64_t c) const {
    return {formulas.from(c), function};
  }
  // The gradient for the i-th contiguous element.
  NORMSCOPE_INLINE ActivatedOutputGradient at(std::int64_t i) const {
    return from(kLayout == Layout::kChannelsLast ? i : 0);
  }

  template <class Value>
  NORMSCOPE_INLINE Value operator()(Value x, Value dy) const {
    if constexpr (std::is_same_v<Value, double> && !std::is_same_v<Real, double>) {
      return static_cast<double>(gradient(static_cast<Real>(x), static_cast<Real>(dy)));
    } else {
      return gradient(x, dy);
    }
  }

 private:
  template <class Value>
  NORMSCOPE_INLINE Value coefficient(const Real* of_channel) const {
    if constexpr (std::is_same_v<Value, Real>) {
      return *of_channel;
    } else if constexpr (kLayout == Layout::kChannelsLast) {
      return load_bytes<Value>(of_channel);
    } else {
      return broadcast(*of_channel);
    }
  }
  template <class Value>
  NORMSCOPE_INLINE Value gradient(Value x, Value dy) const {
    const auto [mean_hi, mean_lo, scale, bias] = formulas.arrays;
    const Normalize<Value> formula{coefficient<Value>(mean_hi), coefficient<Value>(mean_lo),
                                   coefficient<Value>(scale), coefficient<Value>(bias)};
    return rounded<Element>(
        function_of<Value>(function).gradient(rounded<Element>(formula(x)), dy));
  }
};

// dz and dz (x - mean). Gradient computes dz.
template <class Element, class Gradient>
struct GradientRun {
  using ElementType = Element;
  using Real = Arithmetic<Element>;
  static constexpr int kInputs = 2;
  const Element* x;
  std::int64_t x_stride;
  const Element* dy;
  std::int64_t dy_stride;
  Gradient gradient;

  NORMSCOPE_INLINE GradientRun at(std::int64_t row, std::int64_t i) const {
    return {x + row * x_stride + i, x_stride, dy + row * dy_stride + i, dy_stride, gradient.at(i)};
  }
  template <class Copy>
  NORMSCOPE_INLINE GradientRun copied(const Copy& copy) const {
    return {copy(x, x_stride), kLanesOf<Real>, copy(dy, dy_stride), kLanesOf<Real>, gradient};
  }
  NORMSCOPE_INLINE void prefetch_line() const {
    prefetch(x);
    prefetch(dy);
  }

  template <class Load, class Value>
  NORMSCOPE_INLINE Terms<Value> terms(const Load& load, Value mean) const {
    return of(load(x), load(dy), mean);
  }
  template <class LoadBlock, class Use>
  NORMSCOPE_INLINE void for_block(const LoadBlock& load_block, Vector<Real> mean,
                                  const Use& use) const {
    const Block<Element> x_block = load_block(x);
    const Block<Element> dy_block = load_block(dy);
    for (int v = 0; v < kBlockVectors<Element>; ++v) {
      use(v, of(x_block.vectors[v], dy_block.vectors[v], mean));
    }
  }

 private:
  template <class Value>
  NORMSCOPE_INLINE Terms<Value> of(Value one_x, Value one_dy, Value mean) const {
    const Value dz = gradient(one_x, one_dy);
    return {dz, dz * subtract(one_x, mean)};
  }
};

template <class Element, class Gradient>
struct GradientTerms {
  using Run = GradientRun<Element, Gradient>;
  static constexpr bool kHasPivot = false;
  const TensorView& x;
  const TensorView& dy;
  const Arithmetic<Element>* mean_hi;  // [C]
  Gradient gradient;

  [[nodiscard]] constexpr const Arithmetic<Element>* means_from(std::int64_t c) const {
    return mean_hi + c;
  }
  NORMSCOPE_INLINE Run run(std::int64_t n, std::int64_t c, std::int64_t p) const {
    return {element_at<Element>(x, n, c, p), row_stride(x), element_at<Element>(dy, n, c, p),
            row_stride(dy), gradient.from(c)};
  }
};
