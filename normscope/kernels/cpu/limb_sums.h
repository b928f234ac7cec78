// SPDX-License-Identifier: Apache-2.0
//
// Tile sums into limbs, many channels at a time. Included once by each target (vector.h says why).

// Adds what of the parts [kDoubles channels, or 1] lies on grid k to limb(sum, k)[c], and returns
// the rest.
template <class Real>
NORMSCOPE_INLINE Real add_on_grid(const LimbsView& limbs, int sum, int k, std::int64_t c,
                                  Real part) {
  const Real on_grid = round_to_grid(part, grid(k));
  double* limb = limbs.limb(sum, k) + c;
  store_bytes(limb, load_bytes<Real>(limb) + on_grid);
  return part - on_grid;
}

// On the grids from kFirst on, which the parts do not reach beyond. A double has bits on at most
// three grids, and parts of like size mostly begin on the first one: looking at it, and at the
// next, whether there are any would take longer.
template <int kFirst, class Real>
NORMSCOPE_INLINE void add_from_grid(const LimbsView& limbs, int sum, std::int64_t c, Real part) {
  constexpr int kUsual = kFirst + 2 < kLimbs ? kFirst + 2 : kLimbs;
  for (int k = kFirst; k < kUsual; ++k) part = add_on_grid(limbs, sum, k, c, part);
  for (int k = kUsual; k < kLimbs && any_nonzero(part); ++k) {
    part = add_on_grid(limbs, sum, k, c, part);
  }
}

template <class Real>
NORMSCOPE_INLINE bool is_below_first_grid(Real part) {
  return !any_nonzero(round_to_grid(part, grid(0)));
}

template <class Real>
NORMSCOPE_INLINE void add_part(const LimbsView& limbs, int sum, std::int64_t c, Real part) {
  if (is_below_first_grid(part)) {
    add_from_grid<1>(limbs, sum, c, part);
  } else {
    add_from_grid<0>(limbs, sum, c, part);
  }
}

// lo is at most 2^-53 of hi: where hi begins on the second grid, lo begins on the third or below.
template <class Real>
NORMSCOPE_INLINE void add_part(const LimbsView& limbs, int sum, std::int64_t c,
                               DoubleDouble<Real> part) {
  if (is_below_first_grid(part.hi)) {
    add_from_grid<1>(limbs, sum, c, part.hi);
    if (any_nonzero(part.lo)) add_from_grid<2>(limbs, sum, c, part.lo);
  } else {
    add_from_grid<0>(limbs, sum, c, part.hi);
    add_from_grid<0>(limbs, sum, c, part.lo);
  }
}

// The parts of as many channels as a vector of float32 has elements.
NORMSCOPE_INLINE void add_halves(const LimbsView& limbs, int sum, const WideHalves& parts) {
  for (int half = 0; half < 2; ++half) add_part(limbs, sum, half * kDoubles, parts.of[half]);
}

// Calls function(c, Real) for all channels: vectors first, then single ones, with a Real to tell
// by.
template <class Function>
NORMSCOPE_INLINE void for_channels(std::int64_t channels, const Function& function) {
  std::int64_t c = 0;
  for (; c + kDoubles <= channels; c += kDoubles) function(c, Doubles{});
  for (; c < channels; ++c) function(c, double{});
}

// Channels whose tiles wait for their turn in the limbs.
inline constexpr std::int64_t kBatchChannels = 128;

// Sums over the same tile of up to kBatchChannels channels.
struct TileBatch {
  alignas(kVectorBytes) double pivot[kBatchChannels];   // moments only
  alignas(kVectorBytes) double first[kBatchChannels];   // sum(x - pivot), or sum(dy)
  alignas(kVectorBytes) double second[kBatchChannels];  // sum((x - pivot)^2), or sum(dy (x - mean))
};

template <class Value>
NORMSCOPE_INLINE bool is_finite(Value value) {
  return value - value == 0;
}

// Puts the sums of a vector of channels into the batch from `slot` on.
template <class AnyVector>
NORMSCOPE_INLINE void put_sums(AnyVector first, AnyVector second, TileBatch& batch,
                               std::int64_t slot) {
  store_wide(batch.first + slot, first);
  store_wide(batch.second + slot, second);
}

// Calls sum_again(c) for the channels whose sums in float32 are not finite: in float64 they may be.
// The batch is filled by whole vectors.
template <class Element, class SumAgain>
NORMSCOPE_INLINE void for_overflown(const TileBatch& batch, std::int64_t channels,
                                    const SumAgain& sum_again) {
  if constexpr (sizeof(Arithmetic<Element>) == sizeof(double)) return;
  Doubles zero_if_finite{};
  for (std::int64_t c = 0; c < channels; c += kDoubles) {
    const Doubles sum = load(batch.first + c) + load(batch.second + c);
    zero_if_finite += sum - sum;
  }
  if (!any_nonzero(zero_if_finite)) return;
  for (std::int64_t c = 0; c < channels; ++c) {
    if (!is_finite(batch.first[c] + batch.second[c])) sum_again(c);
  }
}

// Tiles of Element.
template <class Element>
NORMSCOPE_INLINE void add_moment_tiles(const TileBatch& batch, std::int64_t tile_size,
                                       const LimbsView& limbs) {
  for_channels(limbs.channels, [&]<class Real>(std::int64_t c, Real zero) {
    const Real n = zero + static_cast<double>(tile_size);
    const Real pivot = load_bytes<Real>(batch.pivot + c);
    const Real first = load_bytes<Real>(batch.first + c);
    const Real second = load_bytes<Real>(batch.second + c);
    TileMoments<Real> tile;
    if constexpr (sizeof(Arithmetic<Element>) < sizeof(double)) {
      tile = moments_about_narrow_pivot(n, pivot, first, second);
    } else {
      tile = moments_about_zero(n, pivot, first, second);
    }
    add_part(limbs, kSumOfValues, c, tile.sum);
    add_part(limbs, kSumOfProducts, c, tile.sum_of_squares);
  });
}

NORMSCOPE_INLINE void add_gradient_tiles(const TileBatch& batch, const LimbsView& limbs) {
  for_channels(limbs.channels, [&]<class Real>(std::int64_t c, Real) {
    add_part(limbs, kSumOfValues, c, load_bytes<Real>(batch.first + c));
    add_part(limbs, kSumOfProducts, c, load_bytes<Real>(batch.second + c));
  });
}

template <class Real>
NORMSCOPE_INLINE void load_canonical(const LimbsView& limbs, int sum, std::int64_t c,
                                     Real (&values)[kLimbs]) {
  for (int k = 0; k < kLimbs; ++k) values[k] = load_bytes<Real>(limbs.limb(sum, k) + c);
  canonicalize(values);
}

NORMSCOPE_INLINE void canonicalize_limbs(const LimbsView& limbs) {
  for (int sum = 0; sum < kSums; ++sum) {
    for_channels(limbs.channels, [&]<class Real>(std::int64_t c, Real) {
      Real values[kLimbs];
      load_canonical(limbs, sum, c, values);
      for (int k = 0; k < kLimbs; ++k) store_bytes(limbs.limb(sum, k) + c, values[k]);
    });
  }
}

void merge_limbs(LimbsView from, LimbsView to) {
  for (int sum = 0; sum < kSums; ++sum) {
    for (int k = 0; k < kLimbs; ++k) {
      for_channels(to.channels, [&]<class Real>(std::int64_t c, Real) {
        double* limb = to.limb(sum, k) + c;
        store_bytes(limb, load_bytes<Real>(limb) + load_bytes<Real>(from.limb(sum, k) + c));
      });
    }
  }
  canonicalize_limbs(to);
}

void moments_of_limbs(LimbsView limbs, double count, MutableStatistics to) {
  for_channels(limbs.channels, [&]<class Real>(std::int64_t c, Real zero) {
    Real sum[kLimbs];
    Real sum_of_squares[kLimbs];
    load_canonical(limbs, kSumOfValues, c, sum);
    load_canonical(limbs, kSumOfProducts, c, sum_of_squares);
    const Moments<Real> result = moments(total(sum), total(sum_of_squares), zero + count);
    store_bytes(to.mean_hi + c, result.mean.hi);
    store_bytes(to.mean_lo + c, result.mean.lo);
    store_bytes(to.inv_std + c, result.population_variance);
  });
}

void gradient_sums_of_limbs(LimbsView limbs, Statistics statistics, GradientSums sums) {
  for_channels(limbs.channels, [&]<class Real>(std::int64_t c, Real) {
    Real dy[kLimbs];
    Real dy_centered[kLimbs];
    load_canonical(limbs, kSumOfValues, c, dy);
    load_canonical(limbs, kSumOfProducts, c, dy_centered);
    const DoubleDouble<Real> sum_dy = total(dy);
    store_bytes(sums.dy + c, sum_dy.hi + sum_dy.lo);
    store_bytes(sums.dy_xhat + c, gradient_sum_with_xhat(sum_dy, total(dy_centered),
                                                         load_bytes<Real>(statistics.mean_lo + c),
                                                         load_bytes<Real>(statistics.inv_std + c)));
  });
}
