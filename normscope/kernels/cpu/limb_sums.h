// SPDX-License-Identifier: Apache-2.0
//
// Limbs, many channels at a time: adding tile sums to them, and the totals. Included once by each
// target (vector.h says why).

// Adds the share of `part` that is a multiple of grid k to limb(sum, k)[c], and returns the
// remainder. A part has kDoubles channels, or one.
template <class Real>
NORMSCOPE_INLINE Real add_on_grid(const LimbsView& limbs, int sum, int k, std::int64_t c,
                                  Real part) {
  const Real on_grid = round_to_grid(part, grid(k));
  double* limb = limbs.limb(sum, k) + c;
  store_bytes(limb, load_bytes<Real>(limb) + on_grid);
  return part - on_grid;
}

// Adds `part` to the grids from kFirst on; it must have no bits on coarser grids. A double has bits
// on at most three grids, and parts of similar size mostly start at kFirst. The first two grids are
// therefore added unconditionally: testing for nonzero bits would take longer.
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

// lo is at most 2^-53 of hi: if hi starts on the second grid, lo starts on the third or a finer
// one.
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

// Calls function(c, Real{}) for all channels: vectors of channels first, then single channels. The
// type of the second argument tells which.
template <class Function>
NORMSCOPE_INLINE void for_channels(std::int64_t channels, const Function& function) {
  std::int64_t c = 0;
  for (; c + kDoubles <= channels; c += kDoubles) function(c, Doubles{});
  for (; c < channels; ++c) function(c, double{});
}

template <class Real>
NORMSCOPE_INLINE void load_canonical(const LimbsView& limbs, int sum, std::int64_t c,
                                     Real (&values)[kLimbs]) {
  for (int k = 0; k < kLimbs; ++k) values[k] = load_bytes<Real>(limbs.limb(sum, k) + c);
  canonicalize(values);
}

void canonicalize_limbs(LimbsView limbs) {
  for (int sum = 0; sum < kSums; ++sum) {
    for_channels(limbs.channels, [&]<class Real>(std::int64_t c, Real) {
      Real values[kLimbs];
      load_canonical(limbs, sum, c, values);
      for (int k = 0; k < kLimbs; ++k) store_bytes(limbs.limb(sum, k) + c, values[k]);
    });
  }
}

void add_limbs(LimbsView from, LimbsView to) {
  for (int sum = 0; sum < kSums; ++sum) {
    for (int k = 0; k < kLimbs; ++k) {
      for_channels(to.channels, [&]<class Real>(std::int64_t c, Real) {
        double* limb = to.limb(sum, k) + c;
        store_bytes(limb, load_bytes<Real>(limb) + load_bytes<Real>(from.limb(sum, k) + c));
      });
    }
  }
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
