// SPDX-License-Identifier: Apache-2.0
#include "normscope/kernels/cpu/cpu.h"

#include <algorithm>
#include <limits>
#include <vector>

#include <unistd.h>

#include "normscope/core/aligned_vector.h"
#include "normscope/core/cache_line.h"
#include "normscope/core/tiles.h"
#include "normscope/kernels/channel_values.h"
#include "normscope/kernels/cpu/pieces.h"

namespace normscope::cpu {
namespace {

// Below this many elements a second thread costs more than it saves: waking one takes about 5 us,
// in which a core sums some ten thousand elements.
constexpr std::int64_t kElementsPerThread = 16384;

// Bytes of a run from which on streamed stores pay although its ends share their cache lines with
// cached ones, and wait for them: between float32 planes of 33x33, which `make bench` with another
// number here shows to be written faster through the cache, and those of 129x129.
constexpr std::int64_t kStreamedRun = 128 * kCacheLine;

// Bytes of a thread's part of a row from which on it is worth having: the hardware follows shorter
// ones badly.
constexpr std::int64_t kRowOfThread = 2048;

// Bytes of a core's L2, above which an output's stores pass the caches by. What the system does not
// tell is taken to be 1 MiB.
std::int64_t cache_per_core() {
  static const std::int64_t kBytes = [] {
    const long told = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return told > 0 ? std::int64_t{told} : std::int64_t{1} << 20;
  }();
  return kBytes;
}

// Tensors of up to so many L2s together are taken to lie in an L3 after the sweep that sums, where
// fetching rows ahead takes longer than it saves. The L3's own size is not to be had: a virtual
// machine may be told that of its whole host.
constexpr std::int64_t kCachesInL3 = 20;

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
void sum_parts(const Execution& execution, const TensorView& x, const Pieces& pieces,
               LimbsView limbs, const Sum& sum) {
  const auto sum_into = [&](TileRange channels, TileRange tiles, LimbsView into) {
    for (std::int64_t begin = tiles.begin; begin < tiles.end; begin += kTilesBetweenCarries) {
      sum(channels, TileRange{begin, std::min(begin + kTilesBetweenCarries, tiles.end)}, into);
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
  for (std::int64_t i = 0; i < threads; ++i) pieces.merge_limbs(own_limbs(i), limbs);
}

template <class Element>
void load_real(ChannelView view, double otherwise, std::int64_t channels, double* to) {
  if (view.data == nullptr) {
    std::fill_n(to, channels, otherwise);
    return;
  }
  const Element* from = static_cast<const Element*>(view.data);
  for (std::int64_t c = 0; c < channels; ++c) to[c] = static_cast<double>(widen(from[c]));
}

// The view's values as float64, or `otherwise`.
std::vector<double> channel_values(ChannelView view, double otherwise, std::int64_t channels) {
  std::vector<double> values(static_cast<std::size_t>(channels));
  with_element_type(view.dtype, [&]<class Element>(Element*) {
    load_real<Element>(view, otherwise, channels, values.data());
  });
  return values;
}

// Arrays of per-channel coefficients, rounded from float64 to the type of the arithmetic.
template <class Real, int kArrays>
class Coefficients {
 public:
  // In the order of interleaved blocks of so many channels, a power of two, where rows are whole
  // lines; 0: in that of the channels.
  explicit Coefficients(std::int64_t channels, Rows rows = Rows::kAny, std::int64_t block = 0)
      : stride_(whole_lines<Real>(channels)),
        block_(rows == Rows::kWholeLines ? block : 0),
        values_(static_cast<std::size_t>(kArrays * stride_)) {}

  // Any NaN becomes the plain one: narrowing to 16 bits counts on it.
  void set(int array, std::int64_t c, double value) {
    values_[static_cast<std::size_t>(array * stride_ + place_of(c))] =
        value == value ? static_cast<Real>(value) : std::numeric_limits<Real>::quiet_NaN();
  }

  // From channel c on, which begins a block.
  [[nodiscard]] const Real* at(int array, std::int64_t c) const {
    return values_.data() + array * stride_ + c;
  }

 private:
  [[nodiscard]] std::int64_t place_of(std::int64_t c) const {
    if (block_ == 0) return c;
    const std::int64_t in_block = c & (block_ - 1);
    return c - in_block + in_block % 2 * (block_ / 2) + in_block / 2;
  }

  std::int64_t stride_;  // from array to array: each begins with a cache line
  std::int64_t block_;
  AlignedVector<Real> values_;
};

// Both the lengths and the addresses have to be whole lines; a stride along one element is none.
Rows rows_of(const MutableTensorView& y) {
  const auto is_whole = [&](std::int64_t elements) {
    return elements * size_of(y.dtype) % kCacheLine == 0;
  };
  const auto address = reinterpret_cast<std::uintptr_t>(y.data);
  const bool fits = y.layout() == Layout::kChannelsLast &&
                    address % static_cast<std::uintptr_t>(kCacheLine) == 0 &&
                    is_whole(y.channels) && (y.positions == 1 || is_whole(y.position_stride)) &&
                    (y.samples == 1 || is_whole(y.sample_stride));
  return fits ? Rows::kWholeLines : Rows::kAny;
}

// Whether y lies in runs of whole cache lines, or in such long ones that their ends do not matter.
bool has_whole_lines(const MutableTensorView& y) {
  const bool is_channels_first = y.layout() == Layout::kChannelsFirst;
  const std::int64_t run = (is_channels_first ? y.positions : y.channels) * size_of(y.dtype);
  return run >= kStreamedRun || run % kCacheLine == 0;
}

// Bytes of y, or of the tensor that y is some channels of: its samples' distance tells. Of one
// sample that may be anything, and so may then be how it is gone through.
double extent(const MutableTensorView& y) {
  const double samples_apart =
      static_cast<double>(y.samples) * static_cast<double>(y.sample_stride);
  const double own =
      static_cast<double>(y.channels) * static_cast<double>(y.elements_per_channel());
  return std::max(samples_apart, own) * static_cast<double>(size_of(y.dtype));
}

// How to go through `tensors` tensors, of which y is the output. Outputs pass the cache by where
// they would not stay in it anyway.
Access access_for(const MutableTensorView& y, int tensors) {
  const double bytes = extent(y);
  const bool streams = bytes > static_cast<double>(cache_per_core()) && has_whole_lines(y);
  return {tensors * bytes > static_cast<double>(kCachesInL3 * cache_per_core()) ? Loads::kFetched
                                                                                : Loads::kCached,
          streams ? Stores::kStreaming : Stores::kCached};
}

template <const Pieces& kPieces>
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
      sum_parts(execution, x, kPieces, limbs,
                [&](TileRange channels, TileRange tiles, LimbsView into) {
                  kPieces.of<Element>().add_moments(x.channel_range(channels.begin, channels.end),
                                                    tiles, into);
                });
    });
  }

  static void finalize_moments(const Execution& /*execution*/, LimbsView limbs, double n,
                               double eps, DType x_dtype, const MomentsResults& results) {
    const auto& [statistics, running, pooled, count_out] = results;
    const std::int64_t channels = limbs.channels;
    if (count_out != nullptr) *count_out = n;
    if (pooled.data != nullptr) kPieces.merge_limbs(limbs, pooled);
    std::vector<double> variance(static_cast<std::size_t>(channels));
    double* mean = statistics.mean_hi;
    double* mean_rest = statistics.mean_lo;
    if (n > 0.0) {
      kPieces.moments(limbs, n, mean, mean_rest, variance.data());
    } else {
      std::fill_n(mean, channels, 0.0);
      std::fill_n(mean_rest, channels, 0.0);
    }
    kPieces.inv_std(variance.data(), eps, channels, statistics.inv_std);
    for (std::int64_t c = 0; n > 0.0 && running.mean.data != nullptr && c < channels; ++c) {
      update_running(running.mean, c, mean[c], running.momentum);
    }
    for (std::int64_t c = 0; n > 0.0 && running.var.data != nullptr && c < channels; ++c) {
      const double sample_variance = variance[static_cast<std::size_t>(c)] * (n / (n - 1.0));
      update_running(running.var, c, sample_variance, running.momentum);
    }
    if (n > 0.0) running.count();
    if (x_dtype == DType::kFloat64) return;
    for (std::int64_t c = 0; c < channels; ++c) {
      const DoubleDouble<double> pair = float32_pair({mean[c], mean_rest[c]});
      mean[c] = pair.hi;
      mean_rest[c] = pair.lo;
    }
  }

  static void normalize(const Execution& execution, const TensorView& x, Statistics statistics,
                        ChannelView weight, ChannelView bias, const MutableTensorView& y) {
    if (x.empty()) return;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      using Real = Arithmetic<Element>;
      const std::vector<double> weights = channel_values(weight, 1.0, x.channels);
      const std::vector<double> biases = channel_values(bias, 0.0, x.channels);
      const Rows rows = rows_of(y);
      Coefficients<Real, 4> values(x.channels, rows, kPieces.of<Element>().interleaved_block);
      for (std::int64_t c = 0; c < x.channels; ++c) {
        values.set(0, c, statistics.mean_hi[c]);
        values.set(1, c, statistics.mean_lo[c]);
        values.set(2, c, weights[static_cast<std::size_t>(c)] * statistics.inv_std[c]);
        values.set(3, c, biases[static_cast<std::size_t>(c)]);
      }
      const Access access = access_for(y, 2);
      for_parts(execution, x, [&](TileRange channels, TileRange tiles) {
        const std::int64_t c = channels.begin;
        kPieces.of<Element>().normalize(
            x.channel_range(c, channels.end),
            {rows, values.at(0, c), values.at(1, c), values.at(2, c), values.at(3, c)}, tiles,
            access, y.channel_range(c, channels.end));
      });
    });
  }

  static void add_gradient_sums(const Execution& execution, const TensorView& x,
                                const TensorView& dy, Statistics statistics, LimbsView limbs) {
    if (x.empty()) return;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      using Real = Arithmetic<Element>;
      Coefficients<Real, 1> mean_hi(x.channels);
      for (std::int64_t c = 0; c < x.channels; ++c) {
        mean_hi.set(0, c, statistics.mean_hi[c]);
      }
      sum_parts(
          execution, x, kPieces, limbs, [&](TileRange channels, TileRange tiles, LimbsView into) {
            kPieces.of<Element>().add_gradient_sums(x.channel_range(channels.begin, channels.end),
                                                    dy.channel_range(channels.begin, channels.end),
                                                    mean_hi.at(0, channels.begin), tiles, into);
          });
    });
  }

  static void finalize_gradient_sums(const Execution& /*execution*/, LimbsView limbs,
                                     Statistics statistics, const GradientResults& results) {
    kPieces.gradient_sums(limbs, statistics, results.sums);
    for (std::int64_t c = 0; c < limbs.channels; ++c) use_gradient_sums(results, c);
  }

  static void input_gradient(const Execution& execution, const TensorView& x, const TensorView& dy,
                             Statistics statistics, ChannelView weight, GradientSums sums,
                             double count, const MutableTensorView& dx) {
    if (x.empty()) return;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      using Real = Arithmetic<Element>;
      const std::vector<double> weights = channel_values(weight, 1.0, x.channels);
      const Rows rows = rows_of(dx);
      Coefficients<Real, 5> values(x.channels, rows, kPieces.of<Element>().interleaved_block);
      for (std::int64_t c = 0; c < x.channels; ++c) {
        const double inv_std = statistics.inv_std[c];
        values.set(0, c, statistics.mean_hi[c]);
        values.set(1, c, statistics.mean_lo[c]);
        values.set(2, c, weights[static_cast<std::size_t>(c)] * inv_std);
        values.set(3, c, sums.dy[c] / count);
        values.set(4, c, inv_std * (sums.dy_xhat[c] / count));
      }
      const Access access = access_for(dx, 3);
      for_parts(execution, x, [&](TileRange channels, TileRange tiles) {
        const std::int64_t c = channels.begin;
        kPieces.of<Element>().input_gradient(x.channel_range(c, channels.end),
                                             dy.channel_range(c, channels.end),
                                             {rows, values.at(0, c), values.at(1, c),
                                              values.at(2, c), values.at(3, c), values.at(4, c)},
                                             tiles, access, dx.channel_range(c, channels.end));
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
