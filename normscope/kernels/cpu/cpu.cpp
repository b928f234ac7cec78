// SPDX-License-Identifier: Apache-2.0
#include "normscope/kernels/cpu/cpu.h"

#include <algorithm>

#include <unistd.h>

#include "normscope/core/aligned_vector.h"
#include "normscope/core/cache_line.h"
#include "normscope/core/tiles.h"
#include "normscope/kernels/channel_values.h"
#include "normscope/kernels/cpu/target.h"
#include "normscope/kernels/finalize.h"

namespace normscope::cpu {
namespace {

// Below this many elements a second thread costs more than it saves: waking one takes about 5 us,
// in which a core sums some ten thousand elements.
constexpr std::int64_t kElementsPerThread = 16384;

// Bytes of a run from which on streamed stores pay although its ends share their cache lines with
// cached ones, and wait for them: between float32 planes of 33x33 and of 129x129.
constexpr std::int64_t kStreamedRun = 128 * kCacheLine;

// Bytes of a thread's part of a row from which on it is worth having: the hardware follows shorter
// ones badly.
constexpr std::int64_t kRowOfThread = 2048;

// Bytes of a core's L2. What the system does not tell is taken to be 1 MiB.
std::int64_t cache_per_core() {
  static const std::int64_t kBytes = [] {
    const long told = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return told > 0 ? std::int64_t{told} : std::int64_t{1} << 20;
  }();
  return kBytes;
}

std::int64_t ceil_divide(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The numbers that fill the cache lines which `count` numbers take.
template <class Number>
std::int64_t whole_lines(std::int64_t count) {
  const std::size_t bytes = whole_cache_lines(static_cast<std::size_t>(count) * sizeof(Number));
  return static_cast<std::int64_t>(bytes / sizeof(Number));
}

std::int64_t tile_count(const TensorView& x) {
  return x.samples * tiles_per_sample(x.layout(), x.positions);
}

// Part `i` of [0, n) split into `parts` of nearly equal length.
TileRange part_of(std::int64_t n, std::int64_t parts, std::int64_t i) {
  return {n * i / parts, n * (i + 1) / parts};
}

std::int64_t useful_threads(std::int64_t threads, const TensorView& x) {
  const std::int64_t elements = x.channels * x.elements_per_channel();
  return std::clamp<std::int64_t>(elements / kElementsPerThread, 1, threads);
}

// Work is cut by channels where each thread's lie apart from the others' in memory, else by tiles:
// then every thread has limbs of its own for all channels, which take time to add up.
bool splits_by_channel(const TensorView& x, std::int64_t threads) {
  if (x.layout() == Layout::kChannelsFirst) return x.channels >= threads;
  const std::int64_t row = x.channels / threads * size_of(x.dtype);
  return x.channels % threads == 0 && row % kCacheLine == 0 && row >= kRowOfThread;
}

// Calls sweep(channels, tiles) for parts of the tensor that together are all of it.
template <class Sweep>
void for_parts(const Execution& execution, const TensorView& x, const Sweep& sweep) {
  const std::int64_t threads = useful_threads(execution.threads, x);
  const TileRange all_channels{0, x.channels};
  const TileRange all_tiles{0, tile_count(x)};
  if (threads == 1) {
    sweep(all_channels, all_tiles);
  } else if (splits_by_channel(x, threads)) {
    execution.parallel_for(
        threads, [&](std::int64_t i) { sweep(part_of(x.channels, threads, i), all_tiles); });
  } else {
    execution.parallel_for(
        threads, [&](std::int64_t i) { sweep(all_channels, part_of(all_tiles.end, threads, i)); });
  }
}

// Calls sum(channels, tiles, limbs) for parts of the tensor, each with limbs of its own where parts
// share channels, and never with more tiles than limbs can count.
template <class Sum>
void sum_parts(const Execution& execution, const TensorView& x, const Target& target,
               LimbsView limbs, const Sum& sum) {
  const auto sum_into = [&](TileRange channels, TileRange tiles, LimbsView into) {
    for (std::int64_t begin = tiles.begin; begin < tiles.end; begin += kTilesBetweenCarries) {
      sum(channels, TileRange{begin, std::min(begin + kTilesBetweenCarries, tiles.end)}, into);
      target.canonicalize(into);
    }
  };
  const std::int64_t threads = useful_threads(execution.threads, x);
  if (threads == 1 || splits_by_channel(x, threads)) {
    for_parts(execution, x, [&](TileRange channels, TileRange tiles) {
      sum_into(channels, tiles, limbs.channel_range(channels.begin, channels.end));
    });
    return;
  }
  // From the limbs of one thread to those of the next, which share no cache line.
  const std::int64_t stride = whole_lines<double>(limbs_size(x.channels));
  AlignedVector<double> storage(static_cast<std::size_t>(threads * stride));
  const auto own_limbs = [&](std::int64_t i) {
    return LimbsView{storage.data() + i * stride, x.channels, x.channels};
  };
  execution.parallel_for(threads, [&](std::int64_t i) {
    sum_into({0, x.channels}, part_of(tile_count(x), threads, i), own_limbs(i));
  });
  for (std::int64_t i = 0; i < threads; ++i) target.add_limbs(own_limbs(i), limbs);
  target.canonicalize(limbs);
}

// So many arrays [C], each of which begins with a cache line.
template <class Real>
class ChannelArrays {
 public:
  ChannelArrays(int arrays, std::int64_t channels)
      : stride_(whole_lines<Real>(channels)), values_(static_cast<std::size_t>(arrays * stride_)) {}

  [[nodiscard]] Real* operator[](int array) { return values_.data() + array * stride_; }

 private:
  std::int64_t stride_;  // from array to array
  AlignedVector<Real> values_;
};

// Bytes of y, or of the tensor that y is some channels of: its samples' distance tells.
double extent(const MutableTensorView& y) {
  const double samples_apart =
      static_cast<double>(y.samples) * static_cast<double>(y.sample_stride);
  const double own =
      static_cast<double>(y.channels) * static_cast<double>(y.elements_per_channel());
  return std::max(samples_apart, own) * static_cast<double>(size_of(y.dtype));
}

// Outputs pass the cache by where they would not stay in it anyway, and lie in runs of whole cache
// lines, or in such long ones that their ends do not matter. That makes the ops of networks some 6
// % faster (docs/performance.md).
Stores stores_for(const MutableTensorView& y) {
  const bool is_channels_first = y.layout() == Layout::kChannelsFirst;
  const std::int64_t run = (is_channels_first ? y.positions : y.channels) * size_of(y.dtype);
  const bool has_whole_lines = run >= kStreamedRun || run % kCacheLine == 0;
  const bool fits = extent(y) <= static_cast<double>(cache_per_core());
  return has_whole_lines && !fits ? Stores::kStreaming : Stores::kCached;
}

template <const Target& kTarget>
struct Backend {
  // As many channels as fill a core's L2 twice: a sweep finds there, or in an L3, most of what the
  // sweep before has read, and fewer channels would be read in shorter runs, which memory is slower
  // at (docs/performance.md). Whole vectors of channels where planes are small, so that
  // neighbouring ones share no cache line.
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
    // As many for each thread.
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
      ChannelArrays<Real> arrays(4, x.channels);
      const NormalizeArrays<Real> formulas{arrays[0], arrays[1], arrays[2], arrays[3]};
      for (std::int64_t c = 0; c < x.channels; ++c) {
        formulas.set(c, normalize_coefficients<Real>(
                            statistics.mean_hi[c], statistics.mean_lo[c], statistics.inv_std[c],
                            channel_value(weight, c, 1.0), channel_value(bias, c, 0.0)));
      }
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
      ChannelArrays<Real> arrays(5, x.channels);
      const InputGradientArrays<Real> formulas{arrays[0], arrays[1], arrays[2], arrays[3],
                                               arrays[4]};
      for (std::int64_t c = 0; c < x.channels; ++c) {
        formulas.set(c, input_gradient_coefficients<Real>(
                            statistics.mean_hi[c], statistics.mean_lo[c], statistics.inv_std[c],
                            channel_value(weight, c, 1.0), sums.dy[c], sums.dy_xhat[c], count));
      }
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
