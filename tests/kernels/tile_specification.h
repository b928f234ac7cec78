// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "normscope/core/element.h"
#include "normscope/core/formulas.h"
#include "normscope/core/limbs.h"
#include "normscope/core/tiles.h"
#include "tests/support/tensor.h"

namespace normscope::testing {

// The contract of core/tiles.h as code: one element at a time, no vector. Every backend that
// promises equal bits must give the canonical limbs of specified_moments and
// specified_gradient_sums, and the elements of specified_y and specified_dx.

// Elements of one tile, one sample and channel, in the order of their positions.
template <class Element>
using Tile = std::vector<Element>;

template <class Element>
std::vector<Tile<Element>> tiles_of(const TensorView& x, std::int64_t n, std::int64_t c) {
  std::vector<Tile<Element>> tiles;
  for (std::int64_t p = 0; p < x.positions; ++p) {
    if (p % tile_shape(x.layout()).positions == 0) tiles.emplace_back();
    const auto* data = static_cast<const Element*>(x.data);
    tiles.back().push_back(
        data[n * x.sample_stride + c * x.channel_stride + p * x.position_stride]);
  }
  return tiles;
}

// The upper half of the lanes is added to the lower half until one is left.
template <class Real>
Real fold(std::vector<Real> lanes) {
  while (lanes.size() > 1) {
    const std::size_t half = lanes.size() / 2;
    for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    lanes.resize(half);
  }
  return lanes[0];
}

// Every lane adds its terms in the order of their positions, beginning with zero.
template <class Real>
Real sum_in_lanes(Layout layout, const std::vector<Real>& terms) {
  std::vector<Real> lanes(static_cast<std::size_t>(tile_shape(layout).lanes));
  for (std::size_t i = 0; i < terms.size(); ++i) {
    lanes[static_cast<std::size_t>(lane_of(layout, static_cast<std::int64_t>(i)))] += terms[i];
  }
  return fold(lanes);
}

// The mean of spread elements, added in lanes of one element each.
template <class Real, class Element>
Real pivot_of(Layout layout, const Tile<Element>& tile) {
  const PivotSamples samples = pivot_samples(layout, static_cast<std::int64_t>(tile.size()));
  std::vector<Real> lanes(static_cast<std::size_t>(tile_shape(layout).pivot_samples));
  for (std::int64_t j = 0; j < samples.count; ++j) {
    lanes[static_cast<std::size_t>(j)] =
        static_cast<Real>(widen(tile[static_cast<std::size_t>(j * samples.stride)]));
  }
  return fold(lanes) / static_cast<Real>(samples.count);
}

struct TileSums {
  double first;
  double second;

  [[nodiscard]] bool finite() const { return std::isfinite(first) && std::isfinite(second); }
};

// sum(x - pivot) and sum((x - pivot)^2)
template <class Real, class Element>
TileSums sums_about(Layout layout, const Tile<Element>& tile, Real pivot) {
  std::vector<Real> first;
  std::vector<Real> second;
  for (const Element element : tile) {
    const Real centered = static_cast<Real>(widen(element)) - pivot;
    first.push_back(centered);
    second.push_back(centered * centered);
  }
  return {static_cast<double>(sum_in_lanes(layout, first)),
          static_cast<double>(sum_in_lanes(layout, second))};
}

// sum(dy) and sum(dy * (x - mean_hi))
template <class Real, class Element>
TileSums gradient_sums(Layout layout, const Tile<Element>& x, const Tile<Element>& dy,
                       Real mean_hi) {
  std::vector<Real> second;
  std::vector<Real> first;
  for (std::size_t i = 0; i < x.size(); ++i) {
    first.push_back(static_cast<Real>(widen(dy[i])));
    second.push_back(first.back() * (static_cast<Real>(widen(x[i])) - mean_hi));
  }
  return {static_cast<double>(sum_in_lanes(layout, first)),
          static_cast<double>(sum_in_lanes(layout, second))};
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

// Sums in the type of the arithmetic; where they are not finite, again in float64 about a pivot
// whose samples are added in float64 and which is rounded to the type of the arithmetic.
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
    for (const Tile<Element>& tile : tiles_of<Element>(x, n, c)) {
      const TileMoments<double> moments = tile_moments(x.layout(), tile);
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
    const auto x_tiles = tiles_of<Element>(x, n, c);
    const auto dy_tiles = tiles_of<Element>(dy, n, c);
    for (std::size_t i = 0; i < x_tiles.size(); ++i) {
      TileSums sums =
          gradient_sums<Real>(x.layout(), x_tiles[i], dy_tiles[i], static_cast<Real>(mean_hi));
      if (!sums.finite()) {
        sums = gradient_sums<double>(x.layout(), x_tiles[i], dy_tiles[i], mean_hi);
      }
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

}  // namespace normscope::testing
