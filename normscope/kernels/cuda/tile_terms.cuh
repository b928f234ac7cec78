// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/core/tiles.h"
#include "normscope/kernels/cuda/finalize.cuh"
#include "normscope/kernels/cuda/limb_sums.cuh"

namespace normscope::cuda {

// The terms of the two sums of a tile, per element. Real is the type in which they are added: the
// type of the arithmetic, or float64 if a tile is summed again.

template <class Real>
struct Terms {
  Real first;
  Real second;
};

template <class Real>
NORMSCOPE_INLINE bool is_finite(Real value) {
  return value - value == 0;
}

// A tile, and its first and last packs, which may be partly outside of it.
inline constexpr int kReachOfTile = static_cast<int>(kChannelsFirstTile.positions) + kPackBytes;

// x - a and (x - a)^2
template <class Element>
struct MomentTerms {
  using ElementType = Element;
  static constexpr bool kHasPivot = true;
  static constexpr int kInputs = 1;
  using User = MomentsUser<Arithmetic<Element>>;

  Elements<const Element> x;

  // Neighbours in all tensors.
  template <int kSize>
  using Row = Pack<Element, kSize>;

  // A thread's view of a run of elements.
  struct Run {
    const Element* x;

    template <int kSize>
    NORMSCOPE_INLINE Row<kSize> load(std::int64_t i) const {
      return load_pack<kSize>(x + i);
    }
    // See load_part_of_pack().
    template <int kSize>
    NORMSCOPE_INLINE Row<kSize> load_part(int begin, const Range& wanted,
                                          const Range& readable) const {
      return load_part_of_pack<kSize>(x, begin, wanted, readable);
    }
    NORMSCOPE_INLINE void skip(std::int64_t elements) { x += elements; }
  };

  NORMSCOPE_INLINE Run run(std::int64_t n, std::int64_t c, std::int64_t p) const {
    return {x.at(n, c, p)};
  }
  // What may be read around this position, as far as a tile's packs reach.
  NORMSCOPE_INLINE Range around(std::int64_t n, std::int64_t c, std::int64_t p) const {
    return x.around(n, c, p, kReachOfTile);
  }
  NORMSCOPE_INLINE void next_position(Run& run) const { run.x += x.position_stride; }

  // The terms of the elements of a row, each around a center of its own.
  template <int kSize, class Real>
  static NORMSCOPE_INLINE void of_row(const Pack<Element, kSize>& row, const Real* centers,
                                      Terms<Real> (&terms)[kSize]) {
    Arithmetic<Element> x[kSize];
    widen_pack(row, x);
    for (int j = 0; j < kSize; ++j) {
      const Real centered = static_cast<Real>(x[j]) - centers[j];
      terms[j] = {centered, centered * centered};
    }
  }

  static NORMSCOPE_INLINE void add(ThreadLimbs& limbs, double size, double center, double first,
                                   double second) {
    limbs.add_moments<Arithmetic<Element>>(size, center, first, second);
  }

  // Tiles of one element each, which is its own pivot, for kWidth channels of one sample.
  template <int kWidth>
  static NORMSCOPE_INLINE void add_element(ThreadLimbs& limbs, const Row<kWidth>& row, int j,
                                           Arithmetic<Element> /*mean*/) {
    limbs.add_square(widen(row.elements[j]));
  }

  // The same for elements of everyday sizes, in fewer operations. The square of a multiple of 2^-50
  // is one of 2^-100. Elements of 16 bits have shorter squares, which leaves room for larger ones.
  class Few {
   public:
    static NORMSCOPE_INLINE bool holds(const Magnitudes& elements) {
      return kIsShort ? elements.within(0x1p-28F, 0x1p19F) : elements.within(0x1p-27F, 0x1p9F);
    }
    template <int kWidth>
    static NORMSCOPE_INLINE void collect(Magnitudes& magnitudes, const Row<kWidth>& row, int j,
                                         float) {
      magnitudes.add(widen(row.elements[j]));
    }
    template <int kWidth>
    NORMSCOPE_INLINE void add(const Row<kWidth>& row, int j, float /*mean*/) {
      const auto x = static_cast<double>(widen(row.elements[j]));
      sum_.add(x);
      squares_.add(x * x);
    }
    NORMSCOPE_INLINE void add_to(ThreadLimbs& limbs) const {
      limbs.add_few(0, sum_);
      limbs.add_few(1, squares_);
    }

   private:
    static constexpr bool kIsShort = sizeof(Element) == 2;
    FewLimbs<1, kIsShort ? 2 : 3> sum_;
    FewLimbs<kIsShort ? 0 : 1, kIsShort ? 3 : 4> squares_;
  };
};

// dy and dy (x - mean)
template <class Element>
struct GradientTerms {
  using ElementType = Element;
  static constexpr bool kHasPivot = false;
  static constexpr int kInputs = 2;
  using User = GradientSumsUser<Arithmetic<Element>>;

  Elements<const Element> x;
  Elements<const Element> dy;
  const double* statistics;  // [slices, 3, C], with the means first

  NORMSCOPE_INLINE double mean(std::int64_t slice, std::int64_t c) const {
    return statistics[slice * 3 * x.channels + c];
  }

  template <int kSize>
  struct Row {
    Pack<Element, kSize> x;
    Pack<Element, kSize> dy;
  };

  struct Run {
    const Element* x;
    const Element* dy;

    template <int kSize>
    NORMSCOPE_INLINE Row<kSize> load(std::int64_t i) const {
      return {load_pack<kSize>(x + i), load_pack<kSize>(dy + i)};
    }
    template <int kSize>
    NORMSCOPE_INLINE Row<kSize> load_part(int begin, const Range& wanted,
                                          const Range& readable) const {
      return {load_part_of_pack<kSize>(x, begin, wanted, readable),
              load_part_of_pack<kSize>(dy, begin, wanted, readable)};
    }
    NORMSCOPE_INLINE void skip(std::int64_t elements) {
      x += elements;
      dy += elements;
    }
  };

  NORMSCOPE_INLINE Run run(std::int64_t n, std::int64_t c, std::int64_t p) const {
    return {x.at(n, c, p), dy.at(n, c, p)};
  }
  NORMSCOPE_INLINE Range around(std::int64_t n, std::int64_t c, std::int64_t p) const {
    const Range of_x = x.around(n, c, p, kReachOfTile);
    const Range of_dy = dy.around(n, c, p, kReachOfTile);
    return {of_x.begin > of_dy.begin ? of_x.begin : of_dy.begin,
            of_x.end < of_dy.end ? of_x.end : of_dy.end};
  }
  NORMSCOPE_INLINE void next_position(Run& run) const {
    run.x += x.position_stride;
    run.dy += dy.position_stride;
  }

  template <int kSize, class Real>
  static NORMSCOPE_INLINE void of_row(const Row<kSize>& row, const Real* means,
                                      Terms<Real> (&terms)[kSize]) {
    Arithmetic<Element> x[kSize];
    Arithmetic<Element> dy[kSize];
    widen_pack(row.x, x);
    widen_pack(row.dy, dy);
    for (int j = 0; j < kSize; ++j) {
      const Real one_dy = static_cast<Real>(dy[j]);
      terms[j] = {one_dy, one_dy * (static_cast<Real>(x[j]) - means[j])};
    }
  }

  static NORMSCOPE_INLINE void add(ThreadLimbs& limbs, double /*size*/, double /*center*/,
                                   double first, double second) {
    limbs.add_gradient_sums(first, second);
  }

  template <int kWidth>
  static NORMSCOPE_INLINE void add_element(ThreadLimbs& limbs, const Row<kWidth>& row, int j,
                                           Arithmetic<Element> mean) {
    using Real = Arithmetic<Element>;
    const auto one_x = static_cast<Real>(widen(row.x.elements[j]));
    const auto one_dy = static_cast<Real>(widen(row.dy.elements[j]));
    auto second = static_cast<double>(one_dy * (one_x - mean));
    if (sizeof(Real) < sizeof(double) && !is_finite(second)) {
      second =
          static_cast<double>(one_dy) * (static_cast<double>(one_x) - static_cast<double>(mean));
    }
    limbs.add_gradient_sums(static_cast<double>(one_dy), second);
  }

  // The same for terms of everyday sizes, in fewer operations. Those of float32 have 24 bits: from
  // 2^-47 on they are multiples of 2^-70.
  class Few {
   public:
    static NORMSCOPE_INLINE bool holds(const Magnitudes& terms) {
      return terms.within(0x1p-47F, 0x1p19F);
    }
    template <int kWidth>
    static NORMSCOPE_INLINE void collect(Magnitudes& magnitudes, const Row<kWidth>& row, int j,
                                         float mean) {
      magnitudes.add(widen(row.dy.elements[j]));
      magnitudes.add(product<kWidth>(row, j, mean));
    }
    template <int kWidth>
    NORMSCOPE_INLINE void add(const Row<kWidth>& row, int j, float mean) {
      sum_.add(static_cast<double>(widen(row.dy.elements[j])));
      products_.add(static_cast<double>(product<kWidth>(row, j, mean)));
    }
    NORMSCOPE_INLINE void add_to(ThreadLimbs& limbs) const {
      limbs.add_few(0, sum_);
      limbs.add_few(1, products_);
    }

   private:
    template <int kWidth>
    static NORMSCOPE_INLINE float product(const Row<kWidth>& row, int j, float mean) {
      return widen(row.dy.elements[j]) * (widen(row.x.elements[j]) - mean);
    }

    FewLimbs<1, 3> sum_;
    FewLimbs<1, 3> products_;
  };
};

// Both sums of each element of a pack, computed in Real.
template <int kPack, class Real>
struct PackSums {
  Real first[kPack] = {};
  Real second[kPack] = {};

  // Adds the elements of a row for which contains(j), each around a center of its own.
  template <class AnyTerms, class Row, class Contains>
  NORMSCOPE_INLINE void add_part(const Row& row, const Real (&centers)[kPack],
                                 const Contains& contains) {
    Terms<Real> terms[kPack];
    AnyTerms::of_row(row, centers, terms);
    NORMSCOPE_UNROLL
    for (int j = 0; j < kPack; ++j) {
      if (!contains(j)) continue;
      first[j] += terms[j].first;
      second[j] += terms[j].second;
    }
  }
  template <class AnyTerms, class Row>
  NORMSCOPE_INLINE void add(const Row& row, const Real (&centers)[kPack]) {
    add_part<AnyTerms>(row, centers, [](int) { return true; });
  }
};

// How many packs a thread has in flight.
inline constexpr int kPacksAtOnce = 8;

// A thread's rows of a tile, a pack of each. next(run) goes to the next row. The constructor loads
// the first ones, because they do not depend on the centers: so many that kAtOnce divides the rest.
template <int kPack, class Real, class AnyTerms, class Next>
class Rows {
 public:
  using Run = typename AnyTerms::Run;
  static constexpr int kAtOnce = kPacksAtOnce / AnyTerms::kInputs;

  __device__ Rows(const Run& run, int rows, const Next& next)
      : run_(run), left_(rows), first_(rows > 0 ? (rows - 1) % kAtOnce + 1 : 0), next_(next) {
    NORMSCOPE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (i >= first_) continue;
      loaded_[i] = run_.template load<kPack>(0);
      next_(run_);
    }
  }

  __device__ void add_to(PackSums<kPack, Real>& sums, const Real (&centers)[kPack]) {
    NORMSCOPE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (i >= first_) break;
      sums.template add<AnyTerms>(loaded_[i], centers);
    }
    for (left_ -= first_; left_ > 0; left_ -= kAtOnce) {
      NORMSCOPE_UNROLL
      for (auto& each : loaded_) {
        each = run_.template load<kPack>(0);
        next_(run_);
      }
      NORMSCOPE_UNROLL
      for (const auto& each : loaded_) sums.template add<AnyTerms>(each, centers);
    }
  }

 private:
  Run run_;    // at the row that is loaded next
  int left_;   // rows that are not added yet
  int first_;  // how many of them the constructor has loaded
  const Next& next_;
  // Set even if there are no rows: otherwise the compiler keeps those of an earlier tile.
  typename AnyTerms::template Row<kPack> loaded_[kAtOnce] = {};
};

// Both sums of a tile, and the center that they are taken around.
struct CenteredSums {
  double center;
  Terms<double> sums;
};

// The place of a tile.
struct Tile {
  std::int64_t sample;
  std::int64_t begin;  // position
  std::int64_t size;   // positions; 0: no tile
};

// Tile `index` of a channel's `count` tiles.
template <Layout kLayout>
NORMSCOPE_INLINE Tile tile_at(std::int64_t index, std::int64_t count, std::int64_t positions) {
  constexpr std::int64_t kSize = tile_shape(kLayout).positions;
  if (index >= count) return {0, 0, 0};
  const std::int64_t per_sample = tiles_per_sample(kLayout, positions);
  const std::int64_t begin = index % per_sample * kSize;
  return {index / per_sample, begin, smaller(positions - begin, kSize)};
}

}  // namespace normscope::cuda
