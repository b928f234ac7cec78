// SPDX-License-Identifier: Apache-2.0
#include "normscope/kernels/cpu/cpu.h"

#include <algorithm>

#include "normscope/kernels/channel_values.h"
#include "normscope/kernels/cpu/activated.h"
#include "normscope/kernels/cpu/channel_arrays.h"
#include "normscope/kernels/cpu/parts.h"
#include "normscope/kernels/cpu/target.h"
#include "normscope/kernels/finalize.h"

namespace normscope::cpu {
namespace {

template <const Target& kTarget>
struct Backend {
  // As many channels as fill a core's L2 twice. The L2 or an L3 then still holds most of what
  // the previous sweep has read. Fewer channels would mean shorter runs, which memory serves more
  // slowly (docs/performance.md). If planes are small, chunks are whole vectors of channels, which
  // keeps neighbouring chunks from sharing a cache line.
  static std::int64_t channels_per_chunk(const TensorView& x, int tensors, int threads) {
    if (x.layout() == Layout::kChannelsLast) {
      const std::int64_t parts = useful_threads(threads, x);
      return splits_by_channel(x, parts) ? x.channels / parts : x.channels;
    }
    const std::int64_t bytes_per_channel =
        std::max<std::int64_t>(1, tensors * x.elements_per_channel() * size_of(x.dtype));
    const std::int64_t fitting = 2 * cache_per_core() / bytes_per_channel;
    const std::int64_t fair_share = ceil_divide(x.channels, threads);
    const std::int64_t most = std::clamp<std::int64_t>(fitting, 1, fair_share);
    // The same number of chunks for each thread.
    const std::int64_t chunks = ceil_divide(ceil_divide(x.channels, most), threads) * threads;
    const std::int64_t chunk = ceil_divide(x.channels, chunks);
    return chunk > 8 ? ceil_divide(chunk, 8) * 8 : chunk;
  }

  static void add_moments(const Execution& execution, const TensorView& x, LimbsView limbs) {
    if (x.empty()) return;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      sum_parts(execution, x, kTarget, limbs,
                [&](TileRange channels, TileRange tiles, LimbsView into) {
                  kTarget.of<Element>().add_moments(x.channel_range(channels.begin, channels.end),
                                                    tiles, into);
                });
    });
  }

  static void finalize_moments(const Execution& /*execution*/, LimbsView limbs, double n,
                               double eps, DType x_dtype, const MomentsResults& results) {
    const auto& [statistics, running, pooled, count_out] = results;
    if (count_out != nullptr) *count_out = n;
    if (pooled.data != nullptr) kTarget.add_limbs(limbs, pooled);
    if (n > 0.0) {
      running.count();
      kTarget.moments(limbs, n, statistics);
    }
    for (std::int64_t c = 0; c < limbs.channels; ++c) {
      Moments<double> moments{};
      if (n > 0.0)
        moments = {{statistics.mean_hi[c], statistics.mean_lo[c]}, statistics.inv_std[c]};
      set_statistics(statistics, c, statistics_of(moments, eps, x_dtype == DType::kFloat64));
      update_running(running, c, moments, n);
    }
  }

  static void normalize(const Execution& execution, const TensorView& x, Statistics statistics,
                        ChannelView weight, ChannelView bias, const MutableTensorView& y) {
    if (x.empty()) return;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      using Real = Arithmetic<Element>;
      const NormalizeFormulas<Real> formulas(x.channels, statistics, weight, bias);
      const Stores stores = stores_for(y);
      for_parts(execution, x, [&](TileRange channels, TileRange tiles) {
        const std::int64_t c = channels.begin;
        kTarget.of<Element>().normalize(x.channel_range(c, channels.end), formulas.from(c), tiles,
                                        stores, y.channel_range(c, channels.end));
      });
    });
  }

  static void add_gradient_sums(const Execution& execution, const TensorView& x,
                                const TensorView& dy, Statistics statistics, LimbsView limbs) {
    if (x.empty()) return;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      using Real = Arithmetic<Element>;
      ChannelArrays<Real> arrays(1, x.channels);
      Real* const mean_hi = arrays[0];
      for (std::int64_t c = 0; c < x.channels; ++c) {
        mean_hi[c] = with_plain_nan(static_cast<Real>(statistics.mean_hi[c]));
      }
      sum_parts(
          execution, x, kTarget, limbs, [&](TileRange channels, TileRange tiles, LimbsView into) {
            kTarget.of<Element>().add_gradient_sums(x.channel_range(channels.begin, channels.end),
                                                    dy.channel_range(channels.begin, channels.end),
                                                    mean_hi + channels.begin, tiles, into);
          });
    });
  }

  static void finalize_gradient_sums(const Execution& /*execution*/, LimbsView limbs,
                                     Statistics statistics, const GradientResults& results) {
    kTarget.gradient_sums(limbs, statistics, results.sums);
    for (std::int64_t c = 0; c < limbs.channels; ++c) use_gradient_sums(results, c);
  }

  static void input_gradient(const Execution& execution, const TensorView& x, const TensorView& dy,
                             Statistics statistics, ChannelView weight, GradientSums sums,
                             double count, const MutableTensorView& dx) {
    if (x.empty()) return;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      using Real = Arithmetic<Element>;
      const InputGradientFormulas<Real> formulas(x.channels, statistics, weight, sums, count);
      const Stores stores = stores_for(dx);
      for_parts(execution, x, [&](TileRange channels, TileRange tiles) {
        const std::int64_t c = channels.begin;
        kTarget.of<Element>().input_gradient(x.channel_range(c, channels.end),
                                             dy.channel_range(c, channels.end), formulas.from(c),
                                             tiles, stores, dx.channel_range(c, channels.end));
      });
    });
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
        .normalize_activated = Activated<kTarget>::normalize,
        .activation_gradient = Activated<kTarget>::activation_gradient,
        .gradient_of_output = Activated<kTarget>::gradient_of_output,
        .add_activated_gradient_sums = Activated<kTarget>::add_gradient_sums,
        .activated_input_gradient = Activated<kTarget>::input_gradient,
    };
  }
};

}  // namespace

constinit const Kernels kBaselineKernels =
    Backend<kBaseline>::kernels("baseline", [] { return kBaseline.can_run(); });
#if defined(__x86_64__)
constinit const Kernels kAvx2Kernels =
    Backend<kAvx2>::kernels("avx2", [] { return kAvx2.can_run(); });
constinit const Kernels kAvx512Kernels =
    Backend<kAvx512>::kernels("avx512", [] { return kAvx512.can_run(); });
#endif

}  // namespace normscope::cpu
