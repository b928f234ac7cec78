// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include <gtest/gtest.h>

#include "normscope/core/element.h"
#include "normscope/core/formulas.h"
#include "normscope/core/limbs.h"
#include "normscope/core/tiles.h"
#include "tests/kernels/channel_run.h"
#include "tests/support/tensor.h"

namespace normscope::testing {

// The contract of core/tiles.h as code: one element at a time, no vector. Every backend that
// promises equal bits must give the canonical limbs of specified_moments and
// specified_gradient_sums, and the elements of specified_y and specified_dx.

// The elements of one tile, of one sample and channel, in the order of their positions.
template <class Element>
class Tile {
 public:
  // Tile `index` of sample n and channel c.
  Tile(const TensorView& x, std::int64_t n, std::int64_t c, std::int64_t index)
      : stride_(x.position_stride) {
    const std::int64_t begin = index * tile_shape(x.layout()).positions;
    size_ = std::min(x.positions - begin, tile_shape(x.layout()).positions);
    first_ = static_cast<const Element*>(x.data) + n * x.sample_stride + c * x.channel_stride +
             begin * stride_;
  }

  [[nodiscard]] std::int64_t size() const { return size_; }
  [[nodiscard]] Element operator[](std::int64_t i) const { return first_[i * stride_]; }

 private:
  const Element* first_;
  std::int64_t stride_;
  std::int64_t size_;
};

// Adds the upper half of the lanes to the lower half until one is left.
template <class Real>
Real fold(std::span<Real> lanes) {
  for (; lanes.size() > 1; lanes = lanes.first(lanes.size() / 2)) {
    for (std::size_t i = 0; i < lanes.size() / 2; ++i) lanes[i] += lanes[i + lanes.size() / 2];
  }
  return lanes[0];
}

// Every lane adds its terms, term(position), in the order of their positions, starting at zero.
template <class Real, class Term>
Real sum_in_lanes(Layout layout, std::int64_t size, const Term& term) {
  Real lanes[kMaxLanes] = {};
  for (std::int64_t i = 0; i < size; ++i) lanes[lane_of(layout, i)] += term(i);
  return fold(std::span(lanes).first(static_cast<std::size_t>(tile_shape(layout).lanes)));
}

// The mean of some of the elements, added in lanes of one element each.
template <class Real, class Element>
Real pivot_of(Layout layout, const Tile<Element>& tile) {
  const PivotSamples samples = pivot_samples(layout, tile.size());
  Real lanes[kMaxLanes] = {};
  for (std::int64_t j = 0; j < samples.count; ++j) {
    lanes[j] = static_cast<Real>(widen(tile[j * samples.stride]));
  }
  const auto all = static_cast<std::size_t>(tile_shape(layout).pivot_samples);
  return fold(std::span(lanes).first(all)) / static_cast<Real>(samples.count);
}

struct TileSums {
  double first;
  double second;

  [[nodiscard]] bool finite() const { return std::isfinite(first) && std::isfinite(second); }
};

// sum(x - pivot) and sum((x - pivot)^2)
template <class Real, class Element>
TileSums sums_about(Layout layout, const Tile<Element>& tile, Real pivot) {
  const auto centered = [&](std::int64_t i) { return static_cast<Real>(widen(tile[i])) - pivot; };
  const auto square = [&](std::int64_t i) { return centered(i) * centered(i); };
  return {static_cast<double>(sum_in_lanes<Real>(layout, tile.size(), centered)),
          static_cast<double>(sum_in_lanes<Real>(layout, tile.size(), square))};
}

// sum(dy) and sum(dy * (x - mean_hi))
template <class Real, class Element>
TileSums gradient_sums(Layout layout, const Tile<Element>& x, const Tile<Element>& dy,
                       Real mean_hi) {
  const auto gradient = [&](std::int64_t i) { return static_cast<Real>(widen(dy[i])); };
  const auto product = [&](std::int64_t i) {
    return gradient(i) * (static_cast<Real>(widen(x[i])) - mean_hi);
  };
  return {static_cast<double>(sum_in_lanes<Real>(layout, x.size(), gradient)),
          static_cast<double>(sum_in_lanes<Real>(layout, x.size(), product))};
}

inline void add_to_limbs(double (&limbs)[kLimbs], double part) {
  for (int k = 0; k < kLimbs; ++k) {
    const double on_grid = round_to_grid(part, grid(k));
    limbs[k] += on_grid;
    part -= on_grid;
  }
}

// The two sums of a channel.
struct ChannelLimbs {
  double sums[kSums][kLimbs] = {};

  void add(int sum, DoubleDouble<double> tile) {
    add_to_limbs(sums[sum], tile.hi);
    add_to_limbs(sums[sum], tile.lo);
  }
};

// Sums in the type of the arithmetic. If they are not finite, sums again in float64, around a pivot
// that is summed in float64 and rounded to the type of the arithmetic.
template <class Element>
TileMoments<double> tile_moments(Layout layout, const Tile<Element>& tile) {
  using Real = Arithmetic<Element>;
  const auto n = static_cast<double>(tile.size());
  auto pivot = static_cast<double>(pivot_of<Real>(layout, tile));
  TileSums sums = sums_about<Real>(layout, tile, static_cast<Real>(pivot));
  if (!sums.finite()) {
    pivot = static_cast<double>(static_cast<Real>(pivot_of<double>(layout, tile)));
    sums = sums_about<double>(layout, tile, pivot);
  }
  return moments_about_zero(n, pivot, sums.first, sums.second);
}

template <class Element>
ChannelLimbs specified_moments(const TensorView& x, std::int64_t c) {
  ChannelLimbs limbs;
  for (std::int64_t n = 0; n < x.samples; ++n) {
    for (std::int64_t i = 0; i < tiles_per_sample(x.layout(), x.positions); ++i) {
      const TileMoments<double> moments = tile_moments(x.layout(), Tile<Element>(x, n, c, i));
      limbs.add(0, moments.sum);
      limbs.add(1, moments.sum_of_squares);
    }
  }
  for (auto& sum : limbs.sums) canonicalize(sum);
  return limbs;
}

template <class Element>
ChannelLimbs specified_gradient_sums(const TensorView& x, const TensorView& dy, std::int64_t c,
                                     double mean_hi) {
  using Real = Arithmetic<Element>;
  ChannelLimbs limbs;
  for (std::int64_t n = 0; n < x.samples; ++n) {
    for (std::int64_t i = 0; i < tiles_per_sample(x.layout(), x.positions); ++i) {
      const Tile<Element> of_x(x, n, c, i);
      const Tile<Element> of_dy(dy, n, c, i);
      TileSums sums = gradient_sums<Real>(x.layout(), of_x, of_dy, static_cast<Real>(mean_hi));
      if (!sums.finite()) sums = gradient_sums<double>(x.layout(), of_x, of_dy, mean_hi);
      limbs.add(0, {sums.first, 0.0});
      limbs.add(1, {sums.second, 0.0});
    }
  }
  for (auto& sum : limbs.sums) canonicalize(sum);
  return limbs;
}

struct SpecifiedChannel {
  double mean_hi;
  double mean_lo;
  double inv_std;
  double weight;
  double bias;
};

// Coefficients are computed in float64 and rounded to the type of the arithmetic.
template <class Element>
double specified_y(const SpecifiedChannel& channel, double x) {
  using Real = Arithmetic<Element>;
  const auto scale = static_cast<Real>(channel.weight * channel.inv_std);
  const Real centered = (static_cast<Real>(x) - static_cast<Real>(channel.mean_hi)) -
                        static_cast<Real>(channel.mean_lo);
  const Real scaled = centered * scale;
  return static_cast<double>(widen(narrow<Element>(scaled + static_cast<Real>(channel.bias))));
}

template <class Element>
double specified_dx(const SpecifiedChannel& channel, double sum_dy, double sum_dy_xhat,
                    double count, double x, double dy) {
  using Real = Arithmetic<Element>;
  const auto scale = static_cast<Real>(channel.weight * channel.inv_std);
  const auto mean_dy = static_cast<Real>(sum_dy / count);
  const auto slope = static_cast<Real>(channel.inv_std * (sum_dy_xhat / count));
  const Real centered = (static_cast<Real>(x) - static_cast<Real>(channel.mean_hi)) -
                        static_cast<Real>(channel.mean_lo);
  const Real projected = centered * slope;
  const Real difference = (static_cast<Real>(dy) - mean_dy) - projected;
  return static_cast<double>(widen(narrow<Element>(difference * scale)));
}

// Fails unless the limbs of a channel have these bits.
inline void expect_limbs(const OwnedLimbs& got, std::int64_t c, const ChannelLimbs& expected) {
  for (int sum = 0; sum < kSums; ++sum) {
    for (int k = 0; k < kLimbs; ++k) {
      ASSERT_PRED2(same_bits, got.limb(sum, k, c), expected.sums[sum][k])
          << "sum " << sum << " limb " << k;
    }
  }
}

// Fails unless channel c of a run has the bits of the specification.
template <class Element>
void expect_as_specified(const Tensor& x, const Tensor& dy, KernelRun& run,
                         const ChannelArray& weight, const ChannelArray& bias, std::int64_t c) {
  const Statistics statistics = run.statistics.view().read_only();
  expect_limbs(run.moments, c, specified_moments<Element>(x.view(), c));
  expect_limbs(run.gradient_sums, c,
               specified_gradient_sums<Element>(x.view(), dy.view(), c, statistics.mean_hi[c]));
  const SpecifiedChannel channel{statistics.mean_hi[c], statistics.mean_lo[c],
                                 statistics.inv_std[c], weight[c], bias[c]};
  const auto i = static_cast<std::size_t>(c);
  const auto count = static_cast<double>(x.view().elements_per_channel());
  for (std::int64_t n = 0; n < x.samples(); ++n) {
    for (std::int64_t p = 0; p < x.positions(); ++p) {
      ASSERT_PRED2(same_bits, run.y.at(n, c, p), specified_y<Element>(channel, x.at(n, c, p)));
      ASSERT_PRED2(same_bits, run.dx.at(n, c, p),
                   specified_dx<Element>(channel, run.dy_sum[i], run.dy_xhat_sum[i], count,
                                         x.at(n, c, p), dy.at(n, c, p)));
    }
  }
}

}  // namespace normscope::testing
