// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "normscope/kernels/cuda/tile_terms.cuh"

namespace normscope::cuda {

// The threads that sum one tile together. They hold its 64 lanes, each thread as many as a pack has
// elements. With packs, a thread has neighbouring lanes. Otherwise its lanes are kThreads apart,
// and neighbouring threads read neighbouring elements.
//
// If a tile does not start with a pack, the lanes are rotated: the first whole pack belongs to the
// first thread, and the elements before it to the last lanes of the last thread. The bits are the
// same. fold() adds lanes whose distance is half their number, in either order, and leaves half as
// many, which are rotated likewise.
template <class Element, Access kAccess>
struct Group {
  static constexpr int kLanes = kPackBytes / static_cast<int>(sizeof(Element));  // per thread
  static constexpr int kThreads = static_cast<int>(kChannelsFirstTile.lanes) / kLanes;

  static NORMSCOPE_INLINE int lane(int thread, int j) {
    return kAccess == Access::kPacks ? thread * kLanes + j : thread + kThreads * j;
  }

  // Adds the upper half of the lanes to the lower half, and so on. The group's first thread gets
  // the result. The whole warp must take part.
  template <class Real>
  static __device__ Real fold(Real (&lanes)[kLanes]) {
    if (kAccess == Access::kElements) fold_own(lanes);
    for (int distance = kThreads / 2; distance > 0; distance /= 2) {
      for (int j = 0; j < (kAccess == Access::kPacks ? kLanes : 1); ++j) {
        lanes[j] += __shfl_down_sync(kWholeWarp, lanes[j], distance, kThreads);
      }
    }
    if (kAccess == Access::kPacks) fold_own(lanes);
    return lanes[0];
  }

  // The value of the group's first thread, for the whole group.
  template <class Real>
  static __device__ Real of_first_thread(Real value) {
    return __shfl_sync(kWholeWarp, value, 0, kThreads);
  }

 private:
  template <class Real>
  static NORMSCOPE_INLINE void fold_own(Real (&lanes)[kLanes]) {
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    }
  }
};

// The pivot of a tile (the mean of some of its elements), computed in Real, for the whole group.
template <class Real, class Element>
__device__ Real pivot_of_tile(const Element* x, std::int64_t size, int thread) {
  using G = Group<Element, Access::kPacks>;
  const PivotSamples samples =
      size > 0 ? pivot_samples(Layout::kChannelsFirst, size) : PivotSamples{0, 0};
  const int count = static_cast<int>(samples.count);  // int: with longer ones, registers spill
  const int stride = static_cast<int>(samples.stride);
  Real lanes[G::kLanes];
  for (int j = 0; j < G::kLanes; ++j) {
    const int lane = G::lane(thread, j);
    lanes[j] = lane < count ? static_cast<Real>(widen(x[lane * stride])) : Real{0};
  }
  const Real sum = G::of_first_thread(G::fold(lanes));
  return sum / static_cast<Real>(samples.count);
}

// Both sums of a tile, computed in Real, around center_of_tile(). The group's first thread gets the
// result.
template <class AnyTerms, class Real, Access kAccess, class CenterOfTile>
__device__ Terms<Real> sums_of_tile(const typename AnyTerms::Run& run, int size,
                                    const Range& readable, const CenterOfTile& center_of_tile,
                                    int thread) {
  using G = Group<typename AnyTerms::ElementType, kAccess>;
  constexpr int kLanes = static_cast<int>(kChannelsFirstTile.lanes);
  Real centers[G::kLanes];
  const auto find_centers = [&] {
    const Real center = center_of_tile();
    for (Real& each : centers) each = center;
  };
  PackSums<G::kLanes, Real> sums;
  if constexpr (kAccess == Access::kPacks) {
    const int first_row = size_before_pack<G::kLanes>(run.x);
    const int rows = size > first_row ? (size - first_row) / kLanes : 0;
    const Range tile{0, size};
    // The packs before the first row and after the last one may be partly in the tile.
    const int lane = G::lane(thread, 0);
    const int before = first_row - kLanes + lane;
    const auto head = run.template load_part<G::kLanes>(before, tile, readable);
    const auto next = [](auto& at) { at.skip(kLanes); };
    auto own = run;
    own.skip(first_row + lane);
    Rows<G::kLanes, Real, AnyTerms, decltype(next)> whole(own, rows, next);
    find_centers();
    const auto add_part = [&](const auto& part, int begin) {
      if (!tile.touches(begin, G::kLanes)) return;
      sums.template add_part<AnyTerms>(part, centers,
                                       [&](int j) { return tile.contains(begin + j); });
    };
    add_part(head, before);
    whole.add_to(sums, centers);
    const int after = first_row + rows * kLanes + lane;
    add_part(run.template load_part<G::kLanes>(after, tile, readable), after);
  } else {
    find_centers();
    for (int row = 0; row < size; row += kLanes) {
      for (int j = 0; j < G::kLanes; ++j) {
        const int i = row + G::lane(thread, j);
        if (i >= size) continue;
        Terms<Real> term[1];
        AnyTerms::of_row(run.template load<1>(i), centers, term);
        sums.first[j] += term[0].first;
        sums.second[j] += term[0].second;
      }
    }
  }
  const Real first_sum = G::fold(sums.first);
  return {first_sum, G::fold(sums.second)};
}

template <class Real, Access kAccess, class AnyTerms>
__device__ CenteredSums centered_sums(const AnyTerms& terms, std::int64_t slice, const Tile& tile,
                                      std::int64_t c, int thread) {
  using Arithmetic = normscope::Arithmetic<typename AnyTerms::ElementType>;
  const auto run = terms.run(tile.sample, c, tile.begin);
  double center = 0.0;
  const auto find_center = [&] {
    if constexpr (AnyTerms::kHasPivot) {
      // Even in float64, the pivot is rounded to the type of the arithmetic.
      center = static_cast<double>(
          static_cast<Arithmetic>(pivot_of_tile<Real>(run.x, tile.size, thread)));
    } else if (tile.size > 0) {  // otherwise the channel may not exist
      center = static_cast<double>(static_cast<Arithmetic>(terms.mean(slice, c)));
    }
    return static_cast<Real>(center);
  };
  const Range readable = terms.around(tile.sample, c, tile.begin);
  const Terms<Real> sums = sums_of_tile<AnyTerms, Real, kAccess>(run, static_cast<int>(tile.size),
                                                                 readable, find_center, thread);
  return {center, {static_cast<double>(sums.first), static_cast<double>(sums.second)}};
}

// Adds the tiles of all channels to their limbs. The tiles of a channel are shared by `groups`
// groups of a block (a power of two) and by gridDim.y blocks. gridDim.z blocks share the slices.
// Limits: 56 to 128 registers; bytes: 0 stack, 0 spilled, 16 shared.
// Loop: at least 8 loads; at least 17 before the first shuffle.
template <Access kAccess, class AnyTerms, class After>
__global__ void __launch_bounds__(kBlockThreads, 2)
    add_tiles_channels_first(AnyTerms terms, int groups, NormBatches batches, DeviceScratch scratch,
                             After after) {
  using Real = Arithmetic<typename AnyTerms::ElementType>;
  using G = Group<typename AnyTerms::ElementType, kAccess>;
  const int thread = static_cast<int>(threadIdx.x) % G::kThreads;
  const int group = static_cast<int>(threadIdx.x) / G::kThreads;
  const int channels_per_block = static_cast<int>(blockDim.x) / G::kThreads / groups;
  const std::int64_t first_channel = std::int64_t{blockIdx.x} * channels_per_block;
  const std::int64_t c = first_channel + group / groups;
  const bool has_channel = c < scratch.channels;
  const std::int64_t positions = terms.x.positions;
  for (std::int64_t slice = blockIdx.z; slice < batches.slices; slice += gridDim.z) {
    const std::int64_t all_tiles =
        batches.samples_of(slice) * tiles_per_sample(Layout::kChannelsFirst, positions);
    ThreadLimbs own;
    // All threads of a warp must run every iteration, because they fold together.
    for (std::int64_t turn = std::int64_t{blockIdx.y} * groups; turn < all_tiles;
         turn += std::int64_t{gridDim.y} * groups) {
      Tile tile = tile_at<Layout::kChannelsFirst>(turn + group % groups,
                                                  has_channel ? all_tiles : 0, positions);
      tile.sample += batches.first_sample(slice);
      CenteredSums result = centered_sums<Real, kAccess>(terms, slice, tile, c, thread);
      if constexpr (sizeof(Real) < sizeof(double)) {
        const bool is_finite_here = tile.size == 0 || thread != 0 ||
                                    (is_finite(result.sums.first) && is_finite(result.sums.second));
        if (__any_sync(kWholeWarp, !is_finite_here)) {
          // By elements, which takes fewer registers and has the same bits.
          const auto again =
              centered_sums<double, Access::kElements>(terms, slice, tile, c, thread);
          if (!is_finite_here) result = again;
        }
      }
      if (thread == 0 && tile.size > 0) {
        AnyTerms::add(own, static_cast<double>(tile.size), result.center, result.sums.first,
                      result.sums.second);
      }
    }
    if (after.lets_next_kernel_start()) let_next_kernel_start();
    if (thread == 0 && has_channel && all_tiles > 0) own.add_to(limbs_of_block(scratch, slice), c);
  }
  finish_channels(scratch, first_channel, first_channel + channels_per_block, after);
}

}  // namespace normscope::cuda
