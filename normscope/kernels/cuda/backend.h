// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "normscope/kernels/cuda/activated.cuh"
#include "normscope/kernels/cuda/apply.cuh"
#include "normscope/kernels/cuda/grid.h"
#include "normscope/kernels/cuda/sum_and_apply.cuh"
#include "normscope/kernels/cuda/sum_channels_first.cuh"
#include "normscope/kernels/cuda/sum_channels_last.cuh"
#include "normscope/kernels/cuda/sum_elements.cuh"
#include "normscope/kernels/device_kernels.h"

namespace normscope::cuda {

template <class Device>
struct Backend {
  template <class Kernel, class... Arguments>
  static void launch(Stream stream, Order order, const Work& work, Kernel kernel,
                     const Arguments&... arguments) {
    const std::int64_t at_once = Device::blocks_at_once(kernel, work.threads_x * work.threads_y);
    Device::launch(stream, grid_for(work, at_once), order, kernel, arguments...);
  }

  template <Access kAccess>
  using AccessConstant = std::integral_constant<Access, kAccess>;

  // Whether all tensors allow packs of `bytes`.
  template <class First, class... Others>
  static bool have_packs(Layout layout, std::int64_t bytes, const First& first,
                         const Others&... others) {
    return layout == Layout::kChannelsFirst
               ? (have_equal_packs_of_planes(first, others, bytes) && ...)
               : has_packs_of_channels(first, bytes) &&
                     (has_packs_of_channels(others, bytes) && ...);
  }

  // Calls function with a constant: kPacks if all tensors allow packs of `bytes`, else kElements.
  template <class Function, class... Views>
  static void with_access(Layout layout, std::int64_t bytes, const Function& function,
                          const Views&... views) {
    if (have_packs(layout, bytes, views...)) {
      function(AccessConstant<Access::kPacks>{});
    } else {
      function(AccessConstant<Access::kElements>{});
    }
  }

  // ---- Sums ------------------------------------------------------------------------------------

  // How a kernel sums tiles: its grid, and what the kernel has to know of it.
  struct PlanOfTiles {
    Grid grid;
    int detail;  // `groups` or `column_bits`
    std::int64_t at_once;
    std::int64_t bytes_of_column;  // of all inputs

    // Whether the blocks of a column, of which there may be so many, find their elements in a cache
    // when they have the coefficients.
    [[nodiscard]] bool can_apply(std::int64_t most_in_column) const {
      const std::int64_t of_block = bytes_of_column / grid.blocks_y;
      const std::int64_t blocks = std::min(grid.blocks_x * grid.blocks_y, at_once);
      return grid.blocks_y <= most_in_column && grid.blocks_z == 1 &&
             of_block <= kMostBytesOfBlock &&
             of_block * ceil_divide(blocks, Device::multiprocessors()) <= kMostBytesInCache;
    }
  };

  template <class AnyTerms>
  static std::int64_t bytes_of_channel(const NormBatches& batches) {
    return batches.samples * batches.positions * AnyTerms::kInputs *
           static_cast<std::int64_t>(sizeof(typename AnyTerms::ElementType));
  }

  template <Access kAccess, class AnyTerms, class Kernel>
  static PlanOfTiles plan_channels_first(Kernel kernel, std::int64_t channels,
                                         const NormBatches& batches) {
    constexpr int kThreads = Group<typename AnyTerms::ElementType, kAccess>::kThreads;
    const std::int64_t at_once = Device::blocks_at_once(kernel, kBlockThreads);
    const std::int64_t tiles =
        batches.slice_size * tiles_per_sample(Layout::kChannelsFirst, batches.positions);
    const auto [groups, work] = work_of_groups(channels, tiles, batches.slices, kThreads,
                                               kBlockThreads, at_once, Device::multiprocessors());
    return {grid_for(work, at_once), groups, at_once,
            work.threads_x / kThreads / groups * bytes_of_channel<AnyTerms>(batches)};
  }

  template <Access kAccess, class AnyTerms, class Kernel>
  static PlanOfTiles plan_channels_last(Kernel kernel, std::int64_t channels,
                                        const NormBatches& batches) {
    constexpr int kPack = kPackSize<typename AnyTerms::ElementType, kAccess>;
    const std::int64_t tiles =
        batches.slice_size * tiles_per_sample(Layout::kChannelsLast, batches.positions);
    const auto [column_bits, work] =
        work_of_tiles(ceil_divide(channels, kPack), kPack, tiles, batches.slices, kMostColumns,
                      kTileThreads, Device::multiprocessors());
    const std::int64_t at_once = Device::blocks_at_once(kernel, work.threads_x * work.threads_y);
    return {grid_for(work, at_once), column_bits, at_once,
            (std::int64_t{kPack} << column_bits) * bytes_of_channel<AnyTerms>(batches)};
  }

  template <Access kAccess, class AnyTerms, class After>
  static void add_tiles(Stream stream, Layout layout, const AnyTerms& terms,
                        const NormBatches& batches, const DeviceScratch& scratch,
                        const After& after) {
    if (layout == Layout::kChannelsFirst) {
      // Where there is one tensor, its planes have packs.
      constexpr Access kOfPlanes = AnyTerms::kInputs == 1 ? Access::kPacks : kAccess;
      const auto kernel = add_tiles_channels_first<kOfPlanes, AnyTerms, After>;
      const PlanOfTiles plan =
          plan_channels_first<kOfPlanes, AnyTerms>(kernel, scratch.channels, batches);
      Device::launch(stream, plan.grid, Order::kAfter, kernel, terms, plan.detail, batches, scratch,
                     after);
    } else {
      const auto kernel = add_tiles_channels_last<kAccess, AnyTerms, After>;
      const PlanOfTiles plan =
          plan_channels_last<kAccess, AnyTerms>(kernel, scratch.channels, batches);
      Device::launch(stream, plan.grid, Order::kAfter, kernel, terms, plan.detail, batches, scratch,
                     after);
    }
  }

  template <Access kAccess, class AnyTerms, class After>
  static void add_single_elements(Stream stream, const AnyTerms& terms, const NormBatches& batches,
                                  const DeviceScratch& scratch, const After& after) {
    launch(stream, Order::kAfter,
           {ceil_divide(scratch.channels, kWarp * kElementWidth<kAccess>), batches.slices,
            ceil_divide(batches.slice_size, kElementRows * kRowsAtOnce), kWarp, kElementRows},
           add_elements<kAccess, AnyTerms, After>, terms, batches, scratch, after);
  }

  // Adds the sums of all slices. Launches its one kernel even if there is nothing to add.
  template <class AnyTerms, class After, class... Views>
  static void add_sums(Stream stream, const AnyTerms& terms, const NormBatches& batches,
                       const DeviceScratch& scratch, const After& after, const Views&... views) {
    using Element = typename AnyTerms::ElementType;
    const Layout layout = std::get<0>(std::tie(views...)).layout();
    if (batches.positions == 1 && layout == Layout::kChannelsLast) {
      with_access(
          layout, kElementWidth<Access::kPacks> * static_cast<std::int64_t>(sizeof(Element)),
          [&](auto access) {
            add_single_elements<access.value>(stream, terms, batches, scratch, after);
          },
          views...);
    } else if (batches.positions == 1) {
      add_single_elements<Access::kElements>(stream, terms, batches, scratch, after);
    } else {
      with_access(
          layout, kPackBytes,
          [&](auto access) {
            add_tiles<access.value>(stream, layout, terms, batches, scratch, after);
          },
          views...);
    }
  }

  // The same, and writes y by the formula `apply` if that takes no other kernel. Returns whether it
  // is written. No data: not wanted.
  template <class AnyTerms, class User, class Apply, class... Views>
  static bool add_sums_and_apply(Stream stream, const AnyTerms& terms, const NormBatches& batches,
                                 const DeviceScratch& scratch, const AfterSums<User>& after,
                                 const Apply& apply, const MutableTensorView& y,
                                 const Views&... views) {
    using Element = typename AnyTerms::ElementType;
    const Layout layout = std::get<0>(std::tie(views...)).layout();
    if (y.data != nullptr && !y.empty() && batches.positions > 1 &&
        have_packs(layout, kPackBytes, y, views...)) {
      const AfterSumsAndApply<User, Apply> outputs{after, apply, elements_of<Element>(y),
                                                   streams(y)};
      if (layout == Layout::kChannelsFirst) {
        using After = AfterSumsOfPlanes<User, Apply>;
        const auto kernel = add_tiles_channels_first<Access::kPacks, AnyTerms, After>;
        const PlanOfTiles plan =
            plan_channels_first<Access::kPacks, AnyTerms>(kernel, scratch.channels, batches);
        if (plan.can_apply(1)) {
          Device::launch(stream, plan.grid, Order::kAfter, kernel, terms, plan.detail, batches,
                         scratch, After{outputs});
          return true;
        }
      } else {
        using After = AfterSumsOfRows<User, Apply>;
        const auto kernel = add_tiles_channels_last<Access::kPacks, AnyTerms, After>;
        PlanOfTiles plan =
            plan_channels_last<Access::kPacks, AnyTerms>(kernel, scratch.channels, batches);
        if (plan.can_apply(Device::most_in_cluster(kernel))) {
          plan.grid.cluster_y = plan.grid.blocks_y;
          Device::launch(stream, plan.grid, Order::kAfter, kernel, terms, plan.detail, batches,
                         scratch, After{outputs, plan.detail});
          return true;
        }
      }
    }
    add_sums(stream, terms, batches, scratch, after, views...);
    return false;
  }

  static bool exchange_moments(Stream stream, const TensorView& x, DeviceScratch scratch,
                               const UseOfMoments& use, const MutableTensorView& y,
                               const MessageView& message, const Header& header,
                               const PeerMemory& peers) {
    bool is_written = false;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      const AfterSums<MomentsUser<Arithmetic<Element>>> after{
          {use, scratch.channels}, message, header, peers};
      const NormalizeElements<Element> formula{{elements_of<Element>(x)},
                                               typed<Element>(use.coefficients)};
      is_written = add_sums_and_apply(stream, MomentTerms<Element>{elements_of<Element>(x)},
                                      use.batches, scratch, after, formula, y, x);
    });
    return is_written;
  }

  static bool exchange_gradient_sums(Stream stream, const TensorView& x, const TensorView& dy,
                                     DeviceScratch scratch, const UseOfGradientSums& use,
                                     const MutableTensorView& dx, const MessageView& message,
                                     const Header& header, const PeerMemory& peers) {
    bool is_written = false;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      const GradientTerms<Element> terms{elements_of<Element>(x), elements_of<Element>(dy),
                                         use.statistics};
      const AfterSums<GradientSumsUser<Arithmetic<Element>>> after{
          {use, scratch.channels}, message, header, peers};
      const InputGradientElements<Element> formula{
          {elements_of<Element>(x), elements_of<Element>(dy)}, typed<Element>(use.coefficients)};
      is_written =
          add_sums_and_apply(stream, terms, use.batches, scratch, after, formula, dx, x, dy);
    });
    return is_written;
  }

  static bool moments(Stream stream, const TensorView& x, DeviceScratch scratch,
                      const UseOfMoments& use, const MutableTensorView& y) {
    return exchange_moments(stream, x, scratch, use, y, {}, {}, {});
  }

  static void send_moments(Stream stream, const TensorView& x, DeviceScratch scratch,
                           const MessageView& message, const Header& header) {
    exchange_moments(stream, x, scratch, {.batches = norm_batches(x, 1)}, {}, message, header, {});
  }

  static bool gradient_sums(Stream stream, const TensorView& x, const TensorView& dy,
                            DeviceScratch scratch, const UseOfGradientSums& use,
                            const MutableTensorView& dx) {
    return exchange_gradient_sums(stream, x, dy, scratch, use, dx, {}, {}, {});
  }

  static void send_gradient_sums(Stream stream, const TensorView& x, const TensorView& dy,
                                 DeviceScratch scratch, const UseOfGradientSums& use,
                                 const MessageView& message, const Header& header) {
    exchange_gradient_sums(stream, x, dy, scratch, use, {}, message, header, {});
  }

  // ---- From sums to results --------------------------------------------------------------------

  static constexpr int kChannelThreads = 128;
  static Grid grid_of_channels(std::int64_t channels) {
    return {ceil_divide(std::max<std::int64_t>(channels, 1), kChannelThreads), 1, 1,
            kChannelThreads, 1};
  }

  template <class User>
  static void use_totals(Stream stream, const MessageView& message, const DeviceScratch& scratch,
                         const User& user) {
    Device::launch(stream, grid_of_channels(message.channels), Order::kAfter, use_message<User>,
                   message, scratch.tickets(), user);
  }

  static void use_moments(Stream stream, DType x_dtype, const MessageView& message,
                          DeviceScratch scratch, const UseOfMoments& use) {
    with_element_type(x_dtype, [&]<class Element>(Element*) {
      use_totals(stream, message, scratch, MomentsUser<Arithmetic<Element>>{use, message.channels});
    });
  }

  static void use_gradient_sums(Stream stream, DType x_dtype, const MessageView& message,
                                DeviceScratch scratch, const UseOfGradientSums& use) {
    with_element_type(x_dtype, [&]<class Element>(Element*) {
      use_totals(stream, message, scratch,
                 GradientSumsUser<Arithmetic<Element>>{use, message.channels});
    });
  }

  static void use_statistics(Stream stream, DType x_dtype, std::int64_t channels,
                             std::int64_t slices, const double* statistics, ChannelView weight,
                             ChannelView bias, Coefficients coefficients) {
    Grid blocks = grid_of_channels(channels);
    blocks.blocks_y = std::clamp<std::int64_t>(slices, 1, kMostInYOrZ);
    with_element_type(x_dtype, [&]<class Element>(Element*) {
      Device::launch(stream, blocks, Order::kAfter,
                     write_coefficients_of_statistics<Arithmetic<Element>>, channels, slices,
                     statistics, weight, bias, coefficients);
    });
  }

  // ---- Outputs ---------------------------------------------------------------------------------

  // Whether a tensor is streamed, because it would leave nothing else in L2.
  static bool streams(const MutableTensorView& y) {
    return y.samples * y.channels * y.positions * size_of(y.dtype) > Device::l2_bytes() / 2;
  }

  template <Access kAccess, class Apply>
  static void apply(Stream stream, Layout layout, const Apply& formula, const NormBatches& batches,
                    const Elements<typename Apply::ElementType>& y, bool streams) {
    using Element = typename Apply::ElementType;
    constexpr int kPack = kPackSize<Element, kAccess>;
    if (layout == Layout::kChannelsFirst) {
      constexpr int kWarps = kBlockThreads / kWarp;
      launch(stream, Order::kEarly,
             {ceil_divide(batches.slice_size * y.channels, kWarps), batches.slices,
              ceil_divide(y.positions, kWarp * kPack * Apply::kAtOnce), kBlockThreads, 1},
             apply_channels_first<kAccess, Apply>, formula, batches, y, streams);
    } else {
      bool joined = y.has_even_rows();
      for (const auto& input : formula.inputs) joined = joined && input.has_even_rows();
      const std::int64_t packs = ceil_divide(y.channels, kPack);
      const int columns = side_by_side(packs, kWarp);
      const int rows = kBlockThreads / columns;
      launch(stream, Order::kEarly,
             {ceil_divide(packs, columns), joined ? batches.slices : batches.samples,
              ceil_divide((joined ? batches.slice_size : 1) * y.positions, rows * Apply::kAtOnce),
              columns, rows},
             apply_channels_last<kAccess, Apply>, formula, batches, y, joined, streams);
    }
  }

  // Writes y with a formula whose inputs are `others`.
  template <class Formula, class... Views>
  static void apply_to(Stream stream, const Formula& formula, const NormBatches& batches,
                       const MutableTensorView& y, const Views&... others) {
    const Layout layout = y.layout();
    with_access(
        layout, kPackBytes,
        [&](auto access) {
          apply<access.value>(stream, layout, formula, batches,
                              elements_of<typename Formula::ElementType>(y), streams(y));
        },
        y, others...);
  }

  // The coefficients of a formula, in the type of its arithmetic.
  template <class Element>
  static const Arithmetic<Element>* typed(const Coefficients& coefficients) {
    return static_cast<const Arithmetic<Element>*>(coefficients.data);
  }

  static void normalize(Stream stream, const TensorView& x, const NormBatches& batches,
                        Coefficients coefficients, const ActivationFunction& activation,
                        const TensorView& residual, const MutableTensorView& y) {
    if (x.empty()) return;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      if (activation.kind == Activation::kNone) {
        const NormalizeElements<Element> formula{{elements_of<Element>(x)},
                                                 typed<Element>(coefficients)};
        apply_to(stream, formula, batches, y, x);
        return;
      }
      using Real = Arithmetic<Element>;
      if (residual.data == nullptr) {
        with_function<Real>(activation, [&]<class Function>(const Function& function) {
          const ActivatedElements<Element, Function, false> formula{
              {elements_of<Element>(x)}, typed<Element>(coefficients), function};
          apply_to(stream, formula, batches, y, x);
        });
        return;
      }
      // Others follow no residual: see ActivationFunction::output_tells_gradient().
      with_piecewise_linear<Real>(activation, [&]<class Function>(const Function& function) {
        const ActivatedElements<Element, Function, true> formula{
            {elements_of<Element>(x), elements_of<Element>(residual)},
            typed<Element>(coefficients),
            function};
        apply_to(stream, formula, batches, y, x, residual);
      });
    });
  }

  static void input_gradient(Stream stream, const TensorView& x, const TensorView& dy,
                             const NormBatches& batches, Coefficients coefficients,
                             const MutableTensorView& dx) {
    if (x.empty()) return;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      const InputGradientElements<Element> formula{
          {elements_of<Element>(x), elements_of<Element>(dy)}, typed<Element>(coefficients)};
      apply_to(stream, formula, batches, dx, x, dy);
    });
  }

  static void activation_gradient(Stream stream, const TensorView& x, const TensorView& dy,
                                  const NormBatches& batches, Coefficients coefficients,
                                  const ActivationFunction& activation,
                                  const MutableTensorView& dz) {
    if (x.empty()) return;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      with_function<Arithmetic<Element>>(activation, [&]<class Function>(const Function& function) {
        const ActivationGradientElements<Element, Function> formula{
            {elements_of<Element>(x), elements_of<Element>(dy)},
            typed<Element>(coefficients),
            function};
        apply_to(stream, formula, batches, dz, x, dy);
      });
    });
  }

  static void gradient_of_output(Stream stream, const TensorView& y, const TensorView& dy,
                                 const NormBatches& batches, const ActivationFunction& activation,
                                 const MutableTensorView& dz) {
    if (y.empty()) return;
    with_element_type(y.dtype, [&]<class Element>(Element*) {
      const auto apply_with = [&]<class Function>(const Function& function) {
        const GradientOfOutputElements<Element, Function> formula{
            {elements_of<Element>(y), elements_of<Element>(dy)}, nullptr, function};
        apply_to(stream, formula, batches, dz, y, dy);
      };
      with_piecewise_linear<Arithmetic<Element>>(activation, apply_with);
    });
  }

  static constexpr DeviceKernels kernels(std::string_view name, std::string (*why_not)()) {
    return {
        .name = name,
        .why_not = why_not,
        .is_capturing = Device::is_capturing,
        .new_zeros = Device::new_zeros,
        .moments = moments,
        .send_moments = send_moments,
        .exchange_moments = exchange_moments,
        .use_moments = use_moments,
        .use_statistics = use_statistics,
        .normalize = normalize,
        .gradient_sums = gradient_sums,
        .send_gradient_sums = send_gradient_sums,
        .exchange_gradient_sums = exchange_gradient_sums,
        .use_gradient_sums = use_gradient_sums,
        .input_gradient = input_gradient,
        .activation_gradient = activation_gradient,
        .gradient_of_output = gradient_of_output,
        .peers = {.allocate = Device::allocate_for_peers,
                  .open = Device::open_of_peer,
                  .allocate_word = Device::allocate_word,
                  .order = Device::order},
    };
  }
};

}  // namespace normscope::cuda
