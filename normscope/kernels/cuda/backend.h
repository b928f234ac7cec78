// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "normscope/kernels/cuda/apply.cuh"
#include "normscope/kernels/cuda/finalize.cuh"
#include "normscope/kernels/cuda/sum_channels_last.cuh"
#include "normscope/kernels/kernels.h"

namespace normscope::cuda {

// The kernels' grids. Device is what launches them: a GPU, or its stand-in on the host for tests.
//
//   struct Device {
//     static int multiprocessors();
//     static std::int64_t cache_bytes();          // of L2
//     static void clear(Stream stream, double* numbers, std::int64_t size);
//     template <class Kernel, class... Arguments>
//     static void launch(Stream stream, Grid grid, Kernel kernel, Arguments... arguments);
//   };
struct Grid {
  std::int64_t blocks_x;
  std::int64_t blocks_y;
  int threads_x;
  int threads_y;
};

[[nodiscard]] constexpr std::int64_t ceil_divide(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

template <class Element, class Pointer>
[[nodiscard]] auto elements_of(const BasicTensorView<Pointer>& x) {
  using Pointed = std::conditional_t<std::is_same_v<Pointer, const void*>, const Element, Element>;
  return Elements<Pointed>{static_cast<Pointed*>(x.data),
                           x.samples,
                           x.channels,
                           x.positions,
                           x.sample_stride,
                           x.channel_stride,
                           x.position_stride};
}

// Whether every run of neighbours begins at a multiple of a pack.
template <class Pointer>
[[nodiscard]] bool has_packs(const BasicTensorView<Pointer>& x) {
  const std::int64_t pack = kPackBytes / size_of(x.dtype);
  const bool is_first = x.layout() == Layout::kChannelsFirst;
  const std::int64_t row_stride = is_first ? x.channel_stride : x.position_stride;
  // Channels that do not fill a last pack would be read beyond their end.
  const bool fills = is_first || x.channels % pack == 0;
  return reinterpret_cast<std::uintptr_t>(x.data) % kPackBytes == 0 && fills &&
         x.sample_stride % pack == 0 && row_stride % pack == 0;
}

template <class Device>
struct Backend {
  // Blocks that keep every multiprocessor busy: several a multiprocessor, since some of them wait.
  static constexpr std::int64_t kBlocksPerMultiprocessor = 8;
  static std::int64_t wanted_blocks() {
    return Device::multiprocessors() * kBlocksPerMultiprocessor;
  }

  // A grid of `columns` blocks, each split while there is work and room for more.
  static Grid grid(std::int64_t columns, std::int64_t work_per_column, int threads_x,
                   int threads_y) {
    constexpr std::int64_t kMost = 65535;  // of a grid in y
    const std::int64_t splits = std::clamp<std::int64_t>(
        std::min(ceil_divide(wanted_blocks(), columns), work_per_column), 1, kMost);
    return {columns, splits, threads_x, threads_y};
  }

  // As many channels as fit the second-level cache with room to spare, so that the second sweep
  // finds there what the first has read.
  static std::int64_t channels_per_chunk(const TensorView& x, int tensors, int /*threads*/) {
    if (x.empty() || x.layout() == Layout::kChannelsLast) return x.channels;
    const std::int64_t bytes = tensors * x.elements_per_channel() * size_of(x.dtype);
    return std::clamp<std::int64_t>(Device::cache_bytes() / 2 / bytes, 1, x.channels);
  }

  template <Access kAccess, class AnyTerms>
  static void add_tiles(Stream stream, Layout layout, const AnyTerms& terms, LimbsView limbs) {
    using Element = typename AnyTerms::ElementType;
    const std::int64_t tiles = terms.x.samples * tiles_per_sample(layout, terms.x.positions);
    if (terms.x.positions == 1) {
      constexpr int kRows = kBlockThreads / kWarp;
      Device::launch(
          stream, grid(ceil_divide(limbs.channels, kWarp), ceil_divide(tiles, kRows), kWarp, kRows),
          add_elements<AnyTerms>, terms, limbs);
    } else if (layout == Layout::kChannelsFirst) {
      constexpr int kGroups = Group<Element, kAccess>::kPerBlock;
      int groups = 1;
      while (groups < kGroups && groups < tiles) groups *= 2;
      Device::launch(stream,
                     grid(ceil_divide(limbs.channels, kGroups / groups), ceil_divide(tiles, groups),
                          kBlockThreads, 1),
                     add_tiles_channels_first<kAccess, AnyTerms>, terms, groups, limbs);
    } else {
      constexpr int kChannels = kWarp * kPackSize<Element, kAccess>;
      Device::launch(stream,
                     grid(ceil_divide(limbs.channels, kChannels),
                          ceil_divide(tiles, kTilesPerBlock), kWarp, kBlockThreads / kWarp),
                     add_tiles_channels_last<kAccess, AnyTerms>, terms, limbs);
    }
  }

  template <class Kernel, class... Arguments>
  static void per_channel(Stream stream, std::int64_t channels, Kernel kernel,
                          Arguments... arguments) {
    constexpr int kThreads = 128;
    // One thread is there for what belongs to no channel.
    const std::int64_t blocks = std::max<std::int64_t>(1, ceil_divide(channels, kThreads));
    Device::launch(stream, Grid{blocks, 1, kThreads, 1}, kernel, arguments...);
  }

  template <Access kAccess, class Apply>
  static void apply(Stream stream, Layout layout, const Apply& formula,
                    const Elements<typename Apply::ElementType>& y) {
    constexpr int kWarps = kBlockThreads / kWarp;
    constexpr int kPack = kPackSize<typename Apply::ElementType, kAccess>;
    if (layout == Layout::kChannelsFirst) {
      Device::launch(stream,
                     grid(ceil_divide(y.samples * y.channels, kWarps),
                          ceil_divide(y.positions, kWarp * kPack), kBlockThreads, 1),
                     apply_channels_first<kAccess, Apply>, formula, y);
    } else {
      Device::launch(stream,
                     grid(ceil_divide(y.channels, kWarp * kPack),
                          ceil_divide(y.samples * y.positions, kWarps), kWarp, kWarps),
                     apply_channels_last<kAccess, Apply>, formula, y);
    }
  }

  template <Access kAccess>
  using AccessConstant = std::integral_constant<Access, kAccess>;

  // Calls function with packs as its constant where all the tensors have them.
  template <class Function, class... Views>
  static void with_access(const Function& function, const Views&... views) {
    if ((has_packs(views) && ...)) {
      function(AccessConstant<Access::kPacks>{});
    } else {
      function(AccessConstant<Access::kElements>{});
    }
  }

  static void add_moments(const Execution& execution, const TensorView& x, LimbsView limbs) {
    if (x.empty()) return;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      const MomentTerms<Element> terms{elements_of<Element>(x)};
      with_access(
          [&](auto access) { add_tiles<access.value>(execution.stream, x.layout(), terms, limbs); },
          x);
    });
  }

  static void finalize_moments(const Execution& execution, LimbsView limbs, const Count& count,
                               double eps, DType x_dtype, const MomentsResults& results) {
    per_channel(execution.stream, limbs.channels, cuda::finalize_moments, limbs, count, eps,
                x_dtype, results);
  }

  static void normalize(const Execution& execution, const TensorView& x, Statistics statistics,
                        ChannelView weight, ChannelView bias, const MutableTensorView& y) {
    if (x.empty()) return;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      const NormalizeElements<Element> formula{elements_of<Element>(x), statistics, weight, bias};
      with_access(
          [&](auto access) {
            apply<access.value>(execution.stream, x.layout(), formula, elements_of<Element>(y));
          },
          x, y);
    });
  }

  static void add_gradient_sums(const Execution& execution, const TensorView& x,
                                const TensorView& dy, Statistics statistics, LimbsView limbs) {
    if (x.empty()) return;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      const GradientTerms<Element> terms{elements_of<Element>(x), elements_of<Element>(dy),
                                         statistics.mean_hi};
      with_access(
          [&](auto access) { add_tiles<access.value>(execution.stream, x.layout(), terms, limbs); },
          x, dy);
    });
  }

  static void finalize_gradient_sums(const Execution& execution, LimbsView limbs,
                                     const Count& count, Statistics statistics,
                                     const GradientResults& results) {
    per_channel(execution.stream, limbs.channels, cuda::finalize_gradient_sums, limbs, count,
                statistics, results);
  }

  static void input_gradient(const Execution& execution, const TensorView& x, const TensorView& dy,
                             Statistics statistics, ChannelView weight, GradientSums sums,
                             const Count& count, const MutableTensorView& dx) {
    if (x.empty()) return;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      const InputGradientElements<Element> formula{
          elements_of<Element>(x), elements_of<Element>(dy), statistics, weight, sums, count};
      with_access(
          [&](auto access) {
            apply<access.value>(execution.stream, x.layout(), formula, elements_of<Element>(dx));
          },
          x, dy, dx);
    });
  }

  static void clear(const Execution& execution, double* numbers, std::int64_t size) {
    Device::clear(execution.stream, numbers, size);
  }

  static void set_cumulative_momentum(const Execution& execution, const std::int64_t* updates,
                                      double* momentum) {
    Device::launch(execution.stream, Grid{1, 1, 1, 1}, cuda::set_cumulative_momentum, updates,
                   momentum);
  }

  static void seal(const Execution& execution, LimbsView limbs, const Header& header,
                   double* header_at) {
    per_channel(execution.stream, limbs.channels, seal_message, limbs, header, header_at);
  }

  static constexpr Kernels kernels(std::string_view name, bool (*can_run)()) {
    return {
        .name = name,
        .can_run = can_run,
        .channels_per_chunk = channels_per_chunk,
        .add_moments = add_moments,
        .finalize_moments = finalize_moments,
        .normalize = normalize,
        .add_gradient_sums = add_gradient_sums,
        .finalize_gradient_sums = finalize_gradient_sums,
        .input_gradient = input_gradient,
        .clear = clear,
        .set_cumulative_momentum = set_cumulative_momentum,
        .seal = seal,
    };
  }
};

}  // namespace normscope::cuda
