// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include "normscope/core/execution.h"
#include "normscope/core/export.h"
#include "normscope/core/inline.h"
#include "normscope/core/limbs.h"
#include "normscope/core/tensor_view.h"

namespace normscope NORMSCOPE_EXPORT {

// Per-channel numbers that somebody else owns: weight, bias, running statistics, their gradients.
// [C]
template <class Pointer>
struct BasicChannelView {
  Pointer data = nullptr;  // nullptr: there is none
  DType dtype = DType::kFloat32;

  // The channels from `begin` on.
  [[nodiscard]] BasicChannelView channel_range(std::int64_t begin) const noexcept {
    using Byte = std::conditional_t<std::is_same_v<Pointer, const void*>, const char, char>;
    if (data == nullptr) return *this;
    return {static_cast<Byte*>(data) + begin * size_of(dtype), dtype};
  }
};
using ChannelView = BasicChannelView<const void*>;
using MutableChannelView = BasicChannelView<void*>;

// What forward keeps for backward. The mean is a pair whose parts have the precision of the
// arithmetic (float32 for inputs up to float32, else float64): docs/numerics.md, "Finalize".
template <class Number>
struct BasicStatistics {
  Number* mean_hi = nullptr;  // [C]
  Number* mean_lo = nullptr;  // [C]
  Number* inv_std = nullptr;  // [C] 1 / sqrt(var + eps)

  [[nodiscard]] constexpr BasicStatistics channel_range(std::int64_t begin) const noexcept {
    return {mean_hi + begin, mean_lo + begin, inv_std + begin};
  }

  [[nodiscard]] constexpr BasicStatistics<const Number> read_only() const noexcept {
    return {mean_hi, mean_lo, inv_std};
  }
};
using Statistics = BasicStatistics<const double>;
using MutableStatistics = BasicStatistics<double>;

// running += momentum * (batch - running), and the update is counted. What is absent stays so;
// nothing happens where the norm batch is empty.
struct RunningUpdate {
  MutableChannelView mean;  // [C]
  MutableChannelView var;   // [C], of the sample variance (divides by n - 1)
  double momentum = 0.0;
  std::int64_t* updates = nullptr;  // [1] += 1

  [[nodiscard]] RunningUpdate channel_range(std::int64_t begin) const noexcept {
    return {mean.channel_range(begin), var.channel_range(begin), momentum,
            begin == 0 ? updates : nullptr};
  }

  NORMSCOPE_INLINE void count() const noexcept {
    if (updates != nullptr) *updates += 1;
  }
};

// How running statistics weigh their updates: each by RunningUpdate::momentum, or all that
// RunningUpdate::updates has counted the same.
enum class RunningAverage { kExponential, kCumulative };

// The momentum by which a cumulative average takes its next update.
[[nodiscard]] NORMSCOPE_INLINE double cumulative_momentum(std::int64_t updates) noexcept {
  return 1.0 / (static_cast<double>(updates) + 1.0);
}

// How the slices of a batch update the running statistics: once with the moments of all of them,
// with the first slice's, or one after the other.
enum class SliceStats { kPooled, kFirst, kSequential };

// Sums of the gradients over a norm batch, or over one rank's part of it.
struct GradientSums {
  double* dy = nullptr;       // [C] g1 = sum(dy)
  double* dy_xhat = nullptr;  // [C] g2 = sum(dy * xhat)

  [[nodiscard]] constexpr GradientSums channel_range(std::int64_t begin) const noexcept {
    return {dy + begin, dy_xhat + begin};
  }
};

// What becomes of the moments of a norm batch. Where data is absent, nothing does.
struct MomentsResults {
  MutableStatistics statistics;
  RunningUpdate running = {};
  LimbsView pooled = {};    // += the limbs, for norm batches that update as one
  double* count = nullptr;  // = the norm batch's

  [[nodiscard]] MomentsResults channel_range(std::int64_t begin, std::int64_t end) const noexcept {
    return {statistics.channel_range(begin), running.channel_range(begin),
            pooled.data == nullptr ? pooled : pooled.channel_range(begin, end),
            begin == 0 ? count : nullptr};
  }
};

// What becomes of the gradient sums of a norm batch, or of one rank's part of it.
struct GradientResults {
  GradientSums sums;
  GradientSums all = {};            // += sums, for a rank of several norm batches
  MutableChannelView dweight = {};  // = all.dy_xhat where there is all, else sums.dy_xhat
  MutableChannelView dbias = {};    // = all.dy, or sums.dy

  [[nodiscard]] GradientResults channel_range(std::int64_t begin) const noexcept {
    return {sums.channel_range(begin), all.dy == nullptr ? all : all.channel_range(begin),
            dweight.channel_range(begin), dbias.channel_range(begin)};
  }
};

// One backend for the host's memory. Tensors have a kernel layout (TensorView::has_kernel_layout),
// dy, y and dx that of x; channel views hold x.channels entries. Nothing throws but what
// `execution.parallel_for` throws.
struct Kernels {
  std::string_view name;

  // Whether this machine can run it.
  bool (*can_run)();

  // How many channels at a time keep `tensors` tensors of x's size in the caches between the sweep
  // that sums and the sweep that applies; x.channels where there is nothing to gain.
  std::int64_t (*channels_per_chunk)(const TensorView& x, int tensors, int threads);

  // limbs += sums of x and x^2, in canonical form.
  void (*add_moments)(const Execution& execution, const TensorView& x, LimbsView limbs);

  void (*finalize_moments)(const Execution& execution, LimbsView limbs, double count, double eps,
                           DType x_dtype, const MomentsResults& results);

  // y = weight * xhat + bias.
  void (*normalize)(const Execution& execution, const TensorView& x, Statistics statistics,
                    ChannelView weight, ChannelView bias, const MutableTensorView& y);

  // limbs += sums of dy and dy * (x - mean_hi), in canonical form.
  void (*add_gradient_sums)(const Execution& execution, const TensorView& x, const TensorView& dy,
                            Statistics statistics, LimbsView limbs);

  void (*finalize_gradient_sums)(const Execution& execution, LimbsView limbs, Statistics statistics,
                                 const GradientResults& results);

  // dx = weight * inv_std * (dy - g1 / n - xhat * g2 / n).
  void (*input_gradient)(const Execution& execution, const TensorView& x, const TensorView& dy,
                         Statistics statistics, ChannelView weight, GradientSums sums, double count,
                         const MutableTensorView& dx);
};

// Every backend that was built: the reference first, then from the plainest to the fastest.
[[nodiscard]] std::span<const Kernels* const> built_kernels();

// Those of them that this machine can run.
[[nodiscard]] std::span<const Kernels* const> available_kernels();

// The fastest available one, or the one that the environment variable NORMSCOPE_KERNELS names (read
// once). Throws ArgumentError, with the names, where that one is not available.
[[nodiscard]] const Kernels& default_kernels();

// The available backend called `name`. Throws ArgumentError, with the names.
[[nodiscard]] const Kernels& kernels_named(std::string_view name);

}  // namespace normscope
