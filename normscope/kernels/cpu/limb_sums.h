// SPDX-License-Identifier: Apache-2.0
//
// Tile sums into limbs, many channels at a time. Included once by each target (vector.h says why).

// Adds the parts [kDoubles channels, or 1] to limb(sum, .)[c]. A double has bits on at most three
// of the grids; the others are passed over.
template <class Real>
NORMSCOPE_INLINE void add_part(const LimbsView& limbs, int sum, std::int64_t c, Real part) {
  for (int k = 0; k < kLimbs; ++k) {
    if (!any_nonzero(part)) return;
    const Real on_grid = round_to_grid(part, grid(k));
    if (!any_nonzero(on_grid)) continue;
    double* limb = limbs.limb(sum, k) + c;
    store_bytes(limb, load_bytes<Real>(limb) + on_grid);
    part = part - on_grid;
  }
}

template <class Real>
NORMSCOPE_INLINE void add_part(const LimbsView& limbs, int sum, std::int64_t c,
                               DoubleDouble<Real> part) {
  add_part(limbs, sum, c, part.hi);
  add_part(limbs, sum, c, part.lo);
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

// Puts sums [channels] of Real into the batch from `slot` on, as float64, and whether all are
// finite. Channels are filled up to a vector's.
template <class Real>
NORMSCOPE_INLINE bool put_sums(const Real* first, const Real* second, std::int64_t channels,
                               TileBatch& batch, std::int64_t slot) {
  Doubles not_finite{};
  for (std::int64_t c = 0; c < channels; c += kDoubles) {
    const Doubles one = load_as_doubles(first + c);
    const Doubles other = load_as_doubles(second + c);
    store(batch.first + slot + c, one);
    store(batch.second + slot + c, other);
    not_finite += (one - one) + (other - other);
  }
  return !any_nonzero(not_finite);
}

NORMSCOPE_INLINE void add_moment_tiles(const TileBatch& batch, std::int64_t tile_size,
                                       const LimbsView& limbs) {
  for_channels(limbs.channels, [&]<class Real>(std::int64_t c, Real zero) {
    const Real n = zero + static_cast<double>(tile_size);
    const TileMoments<Real> tile =
        moments_about_zero(n, load_bytes<Real>(batch.pivot + c), load_bytes<Real>(batch.first + c),
                           load_bytes<Real>(batch.second + c));
    add_part(limbs, 0, c, tile.sum);
    add_part(limbs, 1, c, tile.sum_of_squares);
  });
}

NORMSCOPE_INLINE void add_gradient_tiles(const TileBatch& batch, const LimbsView& limbs) {
  for_channels(limbs.channels, [&]<class Real>(std::int64_t c, Real) {
    add_part(limbs, 0, c, load_bytes<Real>(batch.first + c));
    add_part(limbs, 1, c, load_bytes<Real>(batch.second + c));
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

void moments_of_limbs(LimbsView limbs, double count, double* mean, double* mean_rest,
                      double* population_variance) {
  for_channels(limbs.channels, [&]<class Real>(std::int64_t c, Real zero) {
    Real sum[kLimbs];
    Real sum_of_squares[kLimbs];
    load_canonical(limbs, 0, c, sum);
    load_canonical(limbs, 1, c, sum_of_squares);
    const Moments<Real> result = moments(total(sum), total(sum_of_squares), zero + count);
    store_bytes(mean + c, result.mean.hi);
    store_bytes(mean_rest + c, result.mean.lo);
    store_bytes(population_variance + c, result.population_variance);
  });
}

void inv_std_of_variance(const double* population_variance, double eps, std::int64_t channels,
                         double* inv_std) {
  for_channels(channels, [&]<class Real>(std::int64_t c, Real zero) {
    store_bytes(inv_std + c,
                (zero + 1.0) / square_root(load_bytes<Real>(population_variance + c) + eps));
  });
}

void gradient_sums_of_limbs(LimbsView limbs, Statistics statistics, GradientSums sums) {
  for_channels(limbs.channels, [&]<class Real>(std::int64_t c, Real) {
    Real dy[kLimbs];
    Real dy_centered[kLimbs];
    load_canonical(limbs, 0, c, dy);
    load_canonical(limbs, 1, c, dy_centered);
    const DoubleDouble<Real> sum_dy = total(dy);
    store_bytes(sums.dy + c, sum_dy.hi + sum_dy.lo);
    store_bytes(sums.dy_xhat + c, gradient_sum_with_xhat(sum_dy, total(dy_centered),
                                                         load_bytes<Real>(statistics.mean_lo + c),
                                                         load_bytes<Real>(statistics.inv_std + c)));
  });
}
