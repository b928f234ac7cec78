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

// For several rows at once, whose formula would else be loaded for each of them.
template <class AnyVector>
NORMSCOPE_INLINE Normalize<AnyVector> in_registers(const Normalize<AnyVector>& formula) {
  return {in_register(formula.mean_hi), in_register(formula.mean_lo), in_register(formula.scale),
          in_register(formula.bias)};
}

template <class AnyVector>
NORMSCOPE_INLINE InputGradient<AnyVector> in_registers(const InputGradient<AnyVector>& formula) {
  return {in_register(formula.mean_hi), in_register(formula.mean_lo), in_register(formula.scale),
          in_register(formula.mean_dy), in_register(formula.slope)};
}

// Inputs of a formula at one place: x, or x and dy. A block's vectors may each have a formula of
// their own: formula_of(v).
template <class Element>
struct OneInput {
  const Element* x;

  template <class Formula>
  NORMSCOPE_INLINE auto apply(const Formula& formula, std::int64_t i) const {
    return formula(load(x + i));
  }
  template <class FormulaOf>
  NORMSCOPE_INLINE Block<Element> apply_to_block(const FormulaOf& formula_of,
                                                 std::int64_t i) const {
    auto block = load_block(x + i);
    for (int v = 0; v < kBlockVectors<Element>; ++v) {
      block.vectors[v] = formula_of(v)(block.vectors[v]);
    }
    return block;
  }
  template <class Formula>
  NORMSCOPE_INLINE auto apply_to_one(const Formula& formula, std::int64_t i) const {
    return formula(widen(x[i]));
  }
  NORMSCOPE_INLINE void prefetch_at(std::int64_t i) const { prefetch(x + i); }
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
  template <class FormulaOf>
  NORMSCOPE_INLINE Block<Element> apply_to_block(const FormulaOf& formula_of,
                                                 std::int64_t i) const {
    auto block = load_block(x + i);
    const auto dy_block = load_block(dy + i);
    for (int v = 0; v < kBlockVectors<Element>; ++v) {
      block.vectors[v] = formula_of(v)(block.vectors[v], dy_block.vectors[v]);
    }
    return block;
  }
  template <class Formula>
  NORMSCOPE_INLINE auto apply_to_one(const Formula& formula, std::int64_t i) const {
    return formula(widen(x[i]), widen(dy[i]));
  }
  NORMSCOPE_INLINE void prefetch_at(std::int64_t i) const {
    prefetch(x + i);
    prefetch(dy + i);
  }
  NORMSCOPE_INLINE TwoInputs operator+(std::int64_t offset) const {
    return {x + offset, dy + offset};
  }
};

inline constexpr auto kStoreCached = [](void* to, Words words) { store_bytes(to, words); };
inline constexpr auto kStoreStreaming = [](void* to, Words words) { stream_words(to, words); };

// use(how to store), so that a loop within it need not ask each time.
template <class Use>
NORMSCOPE_INLINE void with_store(Stores stores, const Use& use) {
  if (stores == Stores::kStreaming) {
    use(kStoreStreaming);
  } else {
    use(kStoreCached);
  }
}

// What is fetched while inputs are read at i: those so many elements ahead, or nothing.
struct FetchAhead {
  std::int64_t elements;

  template <class Inputs>
  NORMSCOPE_INLINE void operator()(const Inputs& inputs, std::int64_t i) const {
    inputs.prefetch_at(i + elements);
  }
};
struct FetchNothing {
  template <class Inputs>
  NORMSCOPE_INLINE void operator()(const Inputs& /*inputs*/, std::int64_t /*i*/) const {}
};

// write(i, store) for i from 0 to n, in steps of a vector's bytes of Element: aligned ones as
// `stores` says, and what no whole aligned vector covers by vectors that overlap it. These write
// the same numbers twice, which is why outputs may not be inputs. n is at least one vector.
// fetch(i) comes once a line, for what is written later.
template <class Element, class Fetch, class Write>
NORMSCOPE_INLINE void for_vectors(std::int64_t n, std::int64_t before_alignment, Stores stores,
                                  const Fetch& fetch, const Write& write) {
  constexpr std::int64_t kWidth = kElementsOf<Element>;
  constexpr std::int64_t kLine = kLineElements<Element>;
  std::int64_t i = before_alignment;
  if (i > 0) write(0, kStoreCached);
  with_store(stores, [&](const auto& store) {
    for (; i + kLine <= n; i += kLine) {
      fetch(i);
      for (std::int64_t v = 0; v < kLine; v += kWidth) write(i + v, store);
    }
    if (i < n) fetch(i);
    for (; i + kWidth <= n; i += kWidth) write(i, store);
  });
  if (i < n) write(n - kWidth, kStoreCached);
}

// n neighbours of one channel.
template <class Element, class Inputs, class Formula>
NORMSCOPE_INLINE void apply_to_neighbours(const Inputs inputs, const Formula formula,
                                          std::int64_t n, Stores stores, Element* output) {
  if (n < kElementsOf<Element>) {
    for (std::int64_t i = 0; i < n; ++i) {
      output[i] = narrow<Element>(inputs.apply_to_one(formula, i));
    }
    return;
  }
  const auto vector_formula = broadcast_formula(formula);
  for_vectors<Element>(
      n, elements_before_alignment(output), stores, [](std::int64_t) {},
      [=](std::int64_t i, const auto& store_words) {
        const auto result = inputs.apply_to_block([&](int) { return vector_formula; }, i);
        store_words(output + i, narrow_block(result));
      });
}

// All channels of kRows positions, whose outputs are aligned alike: a channel's coefficients are
// loaded once for them. The coefficients lie as the channels do. `fetch` is one of the above, here
// and below.
template <int kRows, class Element, class Inputs, class Fetch, class Coefficients>
NORMSCOPE_INLINE void apply_to_rows(const Inputs (&inputs)[kRows], const Fetch fetch,
                                    const Coefficients coefficients, std::int64_t channels,
                                    Stores stores, Element* const (&outputs)[kRows]) {
  using Real = Arithmetic<Element>;
  if (channels < kElementsOf<Element>) {
    for (std::int64_t c = 0; c < channels; ++c) {
      const auto formula = formula_at<Real>(coefficients, c);
      for (int row = 0; row < kRows; ++row) {
        outputs[row][c] = narrow<Element>(inputs[row].apply_to_one(formula, c));
      }
    }
    return;
  }
  for_vectors<Element>(
      channels, elements_before_alignment(outputs[0]), stores,
      [&](std::int64_t c) {
        for (int row = 0; row < kRows; ++row) fetch(inputs[row], c);
      },
      [&](std::int64_t c, const auto& store_words) {
        Block<Element> results[kRows];
        for (int v = 0; v < kBlockVectors<Element>; ++v) {
          const std::int64_t begin = c + v * kLanesOf<Real>;
          auto formula = formula_at<Vector<Real>>(coefficients, begin);
          if constexpr (kRows > 1) formula = in_registers(formula);
          for (int row = 0; row < kRows; ++row) {
            results[row].vectors[v] = inputs[row].apply(formula, begin);
          }
        }
        for (int row = 0; row < kRows; ++row) {
          store_words(outputs[row] + c, narrow_in_order<Element>(results[row]));
        }
      });
}

// All channels of one position, where rows are whole lines.
template <class Element, class Inputs, class Fetch, class Coefficients>
NORMSCOPE_INLINE void apply_to_row_of_lines(const Inputs inputs, const Fetch fetch,
                                            const Coefficients coefficients, std::int64_t channels,
                                            Stores stores, Element* output) {
  for_vectors<Element>(
      channels, 0, stores, [=](std::int64_t c) { fetch(inputs, c); },
      [&](std::int64_t c, const auto& store_words) {
        const auto formula_of = [&](int v) {
          return formula_at<Vector<Arithmetic<Element>>>(coefficients,
                                                         c + v * kLanesOf<Arithmetic<Element>>);
        };
        store_words(output + c, narrow_block(inputs.apply_to_block(formula_of, c)));
      });
}

// Rows that are gone through forwards, as prefetching expects it, and what comes next: the same
// rows of other channels, or a run that lies before this one.
struct Run {
  std::int64_t begin;
  std::int64_t end;
  std::int64_t next;          // where the next run begins
  std::int64_t next_channel;  // counted from this run's first
  std::int64_t ahead;         // rows from a row to the one that may be fetched meanwhile

  // From row p to that one; from a sample's last rows, to some that were read before.
  template <class InputsAt>
  NORMSCOPE_INLINE FetchAhead fetch_at(const InputsAt& inputs_at, std::int64_t sample,
                                       std::int64_t p) const {
    const std::int64_t later = p + ahead;
    const auto to_come =
        later < end ? inputs_at(sample, 0, later)
                    : inputs_at(sample, next_channel, smaller(next + (later - end), end - 1));
    return {to_come.x - inputs_at(sample, 0, p).x};
  }
};

// All channels of positions [begin, end) of a sample, where rows are whole lines: a line of
// channels after the other, whose coefficients are loaded once for all positions, and in an order
// that the hardware's prefetching does not follow well.
template <class Element, class InputsAt, class Fetch, class Coefficients, class StoreWords>
NORMSCOPE_INLINE void apply_line_by_line(const InputsAt inputs_at, const Fetch fetch,
                                         const Coefficients coefficients, std::int64_t sample,
                                         std::int64_t begin, std::int64_t end,
                                         const MutableTensorView y, const StoreWords store_words) {
  using Formula = decltype(formula_at<Vector<Arithmetic<Element>>>(coefficients, 0));
  constexpr int kVectors = kBlockVectors<Element>;
  constexpr std::int64_t kLanes = kLanesOf<Arithmetic<Element>>;
  constexpr int kBlocks = kLineElements<Element> / kElementsOf<Element>;
  for (std::int64_t line = 0; line < y.channels; line += kLineElements<Element>) {
    Formula formulas[kBlocks][kVectors];
    for (int b = 0; b < kBlocks; ++b) {
      for (int v = 0; v < kVectors; ++v) {
        formulas[b][v] = formula_at<Vector<Arithmetic<Element>>>(
            coefficients, line + (b * kVectors + v) * kLanes);
      }
    }
    for (std::int64_t p = begin; p < end; ++p) {
      const auto inputs = inputs_at(sample, line, p);
      Element* const output = element_at<Element>(y, sample, line, p);
      fetch(inputs, 0);
      for (int b = 0; b < kBlocks; ++b) {
        const auto formula_of = [&](int v) { return formulas[b][v]; };
        const std::int64_t c = b * kVectors * kLanes;
        store_words(output + c, narrow_block(inputs.apply_to_block(formula_of, c)));
      }
    }
  }
}

// Bytes of a run, of one input: no more than an L2 holds, so that what was summed last is still at
// hand.
inline constexpr std::int64_t kRun = std::int64_t{1} << 19;
// Bytes from a row to the one that is fetched meanwhile: the hardware's own prefetching ends with a
// page. On a Zen 4 a quarter as many were slower, and four times as many where rows are short.
inline constexpr std::int64_t kBytesAhead = 4096;
// Bytes of a row up to which the hardware follows what is read of it and of those beside it. On a
// Zen 4, beyond the caches, fetching rows of 64 bfloat16 took a tenth longer than leaving it;
// leaving rows of 128 float32, twice as long.
inline constexpr std::int64_t kFollowedRow = 2 * kCacheLine;
// Channels of a row, or up to twice as many, that are gone through at a time in a run where rows
// are whole lines. The coefficients of more would be read from L2 for each row.
inline constexpr std::int64_t kPartOfRow = 1024;
// Bytes below which rows are short: what a row costs beside its vectors then shows, and some of
// them share their coefficients. Longer ones are streamed faster one by one.
inline constexpr std::int64_t kShortRow = 1024;

// A run of one sample's positions, all channels, where rows are whole lines of elements of 16 bits:
// short ones line by line, as many at a time as fit into kShortRow. fetch_at(p) is what is fetched
// with row p, here and below.
template <class Element, class InputsAt, class FetchAt, class Coefficients>
NORMSCOPE_INLINE void apply_to_lines(const InputsAt& inputs_at, const FetchAt& fetch_at,
                                     const Coefficients& coefficients, std::int64_t sample,
                                     const Run& run, Stores stores, const MutableTensorView& y) {
  const std::int64_t row = y.channels * static_cast<std::int64_t>(sizeof(Element));
  if (row >= kShortRow) {
    for (std::int64_t p = run.begin; p < run.end; ++p) {
      apply_to_row_of_lines(inputs_at(sample, 0, p), fetch_at(p), coefficients, y.channels, stores,
                            element_at<Element>(y, sample, 0, p));
    }
    return;
  }
  const std::int64_t rows = kShortRow / row;
  with_store(stores, [&](const auto& store) {
    for (std::int64_t p = run.begin; p < run.end; p += rows) {
      apply_line_by_line<Element>(inputs_at, fetch_at(p), coefficients, sample, p,
                                  smaller(p + rows, run.end), y, store);
    }
  });
}

// A run of one sample's positions, all channels. Other short rows than those of 16-bit elements in
// whole lines are taken in pairs, if they are aligned alike: memory is their bound sooner, and
// pairs are closer to the order in which they lie.
template <class Element, class InputsAt, class FetchAt, class Coefficients>
NORMSCOPE_INLINE void apply_to_run(const InputsAt& inputs_at, const FetchAt& fetch_at,
                                   const Coefficients& coefficients, std::int64_t sample,
                                   const Run& run, Stores stores, const MutableTensorView& y) {
  if constexpr (sizeof(Element) == 2) {
    if (coefficients.rows == Rows::kWholeLines) {
      apply_to_lines<Element>(inputs_at, fetch_at, coefficients, sample, run, stores, y);
      return;
    }
  }
  const auto apply_to = [&](const auto fetch, auto... positions) {
    apply_to_rows<sizeof...(positions), Element>({inputs_at(sample, 0, positions)...}, fetch,
                                                 coefficients, y.channels, stores,
                                                 {element_at<Element>(y, sample, 0, positions)...});
  };
  std::int64_t p = run.begin;
  if (y.channels * static_cast<std::int64_t>(sizeof(Element)) < kShortRow &&
      y.position_stride % kElementsOf<Element> == 0) {
    for (; p + 2 <= run.end; p += 2) apply_to(fetch_at(p), p, p + 1);
  }
  for (; p < run.end; ++p) apply_to(fetch_at(p), p);
}

// Positions [begin, end) of one sample, all channels: run by run, the last ones first, each in
// parts of channels.
template <class Element, class InputsAt, class Coefficients>
NORMSCOPE_INLINE void apply_to_positions(const InputsAt& inputs_at,
                                         const Coefficients& coefficients, std::int64_t sample,
                                         std::int64_t begin, std::int64_t end, Access access,
                                         const MutableTensorView& y) {
  constexpr std::int64_t kSize = sizeof(Element);
  const std::int64_t rows_of_run = larger(1, kRun / (y.channels * kSize));
  while (end > begin) {
    const std::int64_t first = larger(begin, end - rows_of_run);
    const std::int64_t next = larger(begin, first - rows_of_run);
    for (std::int64_t c = 0; c < y.channels;) {
      const std::int64_t left = y.channels - c;
      const bool is_cut = coefficients.rows == Rows::kWholeLines && left >= 2 * kPartOfRow;
      const std::int64_t channels = is_cut ? kPartOfRow : left;
      const std::int64_t ahead = larger(1, kBytesAhead / (channels * kSize));
      const Run run{first, end, is_cut ? first : next, is_cut ? channels : -c, ahead};
      const auto part_at = [&](std::int64_t n, std::int64_t i, std::int64_t p) {
        return inputs_at(n, c + i, p);
      };
      const auto apply = [&](const auto& fetch_at) {
        apply_to_run<Element>(part_at, fetch_at, coefficients.from(c), sample, run, access.stores,
                              y.channel_range(c, c + channels));
      };
      // Nothing follows from the part of a row to that of the next.
      const bool is_part = channels < y.channels;
      const bool is_long = channels * kSize > kFollowedRow;
      if (is_part || (access.loads == Loads::kFetched && is_long)) {
        apply([&](std::int64_t p) { return run.fetch_at(part_at, sample, p); });
      } else {
        apply([](std::int64_t) { return FetchNothing{}; });
      }
      c += channels;
    }
    end = first;
  }
}

// Applies a formula to the tiles, those of the last samples first. inputs_at(n, c, p) gives the
// inputs there.
template <class Element, class InputsAt, class Coefficients>
NORMSCOPE_INLINE void apply_to_tiles(const InputsAt& inputs_at, const Coefficients& coefficients,
                                     Layout layout, TileRange tiles, Access access,
                                     const MutableTensorView& y) {
  using Real = Arithmetic<Element>;
  const std::int64_t tile_size = tile_shape(layout).positions;
  const std::int64_t per_sample = tiles_per_sample(layout, y.positions);
  for (std::int64_t tile = tiles.end; tile > tiles.begin;) {
    const std::int64_t n = (tile - 1) / per_sample;
    const std::int64_t first = larger(tiles.begin, n * per_sample);
    const std::int64_t begin = (first - n * per_sample) * tile_size;
    const std::int64_t end = smaller((tile - n * per_sample) * tile_size, y.positions);
    if (layout == Layout::kChannelsLast) {
      apply_to_positions<Element>(inputs_at, coefficients, n, begin, end, access, y);
    } else {
      for (std::int64_t c = 0; c < y.channels; ++c) {
        apply_to_neighbours(inputs_at(n, c, begin), formula_at<Real>(coefficients, c), end - begin,
                            access.stores, element_at<Element>(y, n, c, begin));
      }
    }
    tile = first;
  }
}

// Every tensor with one position a sample is also one of a single sample, whose positions they are.
template <class View>
NORMSCOPE_INLINE View samples_as_positions(View x) {
  x.positions = x.samples;
  x.position_stride = x.sample_stride;
  x.samples = 1;
  return x;
}

template <class Element>
NORMSCOPE_INLINE auto inputs_of(const TensorView& x) {
  return [x](std::int64_t n, std::int64_t c, std::int64_t p) {
    return OneInput<Element>{element_at<Element>(x, n, c, p)};
  };
}
template <class Element>
NORMSCOPE_INLINE auto inputs_of(const TensorView& x, const TensorView& dy) {
  return [x, dy](std::int64_t n, std::int64_t c, std::int64_t p) {
    return TwoInputs<Element>{element_at<Element>(x, n, c, p), element_at<Element>(dy, n, c, p)};
  };
}

// `inputs` are the tensors that the formula is of.
template <class Element, class Coefficients, class... Inputs>
NORMSCOPE_INLINE void apply_to_tensors(const Coefficients& coefficients, TileRange tiles,
                                       Access access, const MutableTensorView& y,
                                       const Inputs&... inputs) {
  if (y.layout() == Layout::kChannelsLast && y.positions == 1) {
    apply_to_positions<Element>(inputs_of<Element>(samples_as_positions(inputs)...), coefficients,
                                0, tiles.begin, tiles.end, access, samples_as_positions(y));
  } else {
    apply_to_tiles<Element>(inputs_of<Element>(inputs...), coefficients, y.layout(), tiles, access,
                            y);
  }
  if (access.stores == Stores::kStreaming) finish_streaming();
}
