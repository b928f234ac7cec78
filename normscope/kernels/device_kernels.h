// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string_view>

#include "normscope/core/activation.h"
#include "normscope/core/export.h"
#include "normscope/core/header.h"
#include "normscope/core/inline.h"
#include "normscope/core/limbs.h"
#include "normscope/core/message_view.h"
#include "normscope/core/stream.h"
#include "normscope/core/tensor_view.h"
#include "normscope/kernels/kernels.h"

namespace normscope NORMSCOPE_EXPORT {

// What a device finds out when nobody waits for it, in memory of the host that the device can write
// (pinned and mapped). It stays until somebody clears it.
struct DeviceReport {
  int mismatch = 0;   // not 0: the call in which ranks met that were in another
  int one_value = 0;  // not 0: the call whose norm batch had one value per channel
};

// Zeros of the device, which every call leaves as zeros: where its blocks add their sums, and count
// who has finished. Calls on one stream can share them.
struct DeviceScratch {
  double* data = nullptr;  // device_scratch_size()
  std::int64_t channels = 0;

  // The sums of a slice.
  [[nodiscard]] NORMSCOPE_INLINE LimbsView limbs(std::int64_t slice) const noexcept {
    return {data + slice * kSums * kLimbs * channels, channels, channels};
  }

  // Counters of blocks: [0] of the whole grid, [1 + i] of column i of it, of at most max(channels,
  // 1).
  [[nodiscard]] NORMSCOPE_INLINE unsigned* tickets(std::int64_t slices) const noexcept {
    return reinterpret_cast<unsigned*>(data + slices * kSums * kLimbs * channels);
  }
};

// Doubles of DeviceScratch::data.
[[nodiscard]] constexpr std::int64_t device_scratch_size(std::int64_t channels,
                                                         std::int64_t slices) noexcept {
  const std::int64_t tickets = 1 + std::max<std::int64_t>(channels, 1);
  return slices * limbs_size(channels) + (tickets + 1) / 2;
}

// The norm batches of a call: slices of this rank's batch, or one that ranks share.
struct NormBatches {
  std::int64_t samples = 0;     // of this rank
  std::int64_t positions = 0;   // of a sample
  std::int64_t slices = 1;      // those of torch.chunk: of slice_size samples, the last of fewer
  std::int64_t slice_size = 0;  // samples

  // The message's header after the all-reduce, on the device; nullptr: no other rank shares.
  const double* totals = nullptr;
  int ranks = 1;
  DeviceReport* report = nullptr;
  int call = 0;  // what the report says

  [[nodiscard]] NORMSCOPE_INLINE std::int64_t first_sample(std::int64_t slice) const noexcept {
    return slice * slice_size;
  }
  [[nodiscard]] NORMSCOPE_INLINE std::int64_t samples_of(std::int64_t slice) const noexcept {
    const std::int64_t left = samples - first_sample(slice);
    return left < slice_size ? left : slice_size;
  }

  // The elements per channel of a norm batch. NaN if the ranks disagree or one value has no
  // variance, for everything that follows.
  [[nodiscard]] NORMSCOPE_INLINE double count(std::int64_t slice) const noexcept {
    if (totals == nullptr) return static_cast<double>(samples_of(slice) * positions);
    const bool is_good = ranks_agree(totals, ranks) && totals[kCount] != 1.0;
    return is_good ? totals[kCount] : std::numeric_limits<double>::quiet_NaN();
  }

  // Puts down why count() is NaN, if there is a report.
  NORMSCOPE_INLINE void report_error() const noexcept {
    if (totals == nullptr || report == nullptr) return;
    if (!ranks_agree(totals, ranks)) {
      report->mismatch = call;
    } else if (totals[kCount] == 1.0) {
      report->one_value = call;
    }
  }
};

// The slices of a whole batch, for this rank alone.
[[nodiscard]] constexpr NormBatches norm_batches(const TensorView& x,
                                                 std::int64_t slices) noexcept {
  return {.samples = x.samples,
          .positions = x.positions,
          .slices = slices,
          .slice_size = (x.samples + slices - 1) / slices};
}

// Per channel, what the formulas of core/formulas.h take, rounded once to the type of x's
// arithmetic, so that no thread has to: `kNormalize` or `kInputGradient` numbers [slices, ., C].
struct Coefficients {
  static constexpr std::int64_t kNormalize = 4;      // mean_hi, mean_lo, scale, bias
  static constexpr std::int64_t kInputGradient = 5;  // mean_hi, mean_lo, scale, mean_dy, slope

  void* data = nullptr;  // aligned to 64 bytes
};

// What forward does with the moments of x.
struct UseOfMoments {
  NormBatches batches = {};
  double eps = 0.0;
  ChannelView weight = {};
  ChannelView bias = {};
  RunningUpdate running = {};
  RunningAverage running_average = RunningAverage::kExponential;
  SliceStats slice_stats = SliceStats::kPooled;
  double* statistics = nullptr;    // out [slices, 3, C]: mean_hi, mean_lo, inv_std
  double* counts = nullptr;        // out [slices]; none: not wanted
  MessageView accumulated = {};    // += the moments; none: not wanted
  Coefficients coefficients = {};  // out, for normalize
};

// What backward does with the sums of the gradients.
struct UseOfGradientSums {
  NormBatches batches = {};
  const double* statistics = nullptr;  // [slices, 3, C], from forward
  ChannelView weight = {};
  MutableChannelView dweight = {};  // out [C] sum(dy * xhat) over all slices; none: not wanted
  MutableChannelView dbias = {};    // out [C] sum(dy) over all slices; none: not wanted
  Coefficients coefficients = {};   // out, for input_gradient; none: not wanted
};

// One backend for a device's memory, which the host cannot touch. Each function queues one kernel
// on the stream, and waits for nothing: a launch takes longer than the arithmetic of a small layer.
// Views, layouts and shapes as for Kernels; tensors may be empty. Throws DeviceError.
struct DeviceKernels {
  std::string_view name;

  // Whether the calling thread's current device can run it.
  bool (*can_run)();

  // Whether a graph records what is put on the stream.
  bool (*is_capturing)(Stream stream);

  // Sums x and x^2 over each slice, and uses them.
  void (*moments)(Stream stream, const TensorView& x, DeviceScratch scratch,
                  const UseOfMoments& use);

  // Sums them over this rank's samples for a message, in canonical form, behind the header.
  void (*send_moments)(Stream stream, const TensorView& x, DeviceScratch scratch,
                       const MessageView& message, const Header& header);

  // Uses the totals of a message.
  void (*use_moments)(Stream stream, DType x_dtype, const MessageView& message,
                      DeviceScratch scratch, const UseOfMoments& use);

  // The coefficients of statistics that are there already.
  void (*use_statistics)(Stream stream, DType x_dtype, std::int64_t channels, std::int64_t slices,
                         const double* statistics, ChannelView weight, ChannelView bias,
                         Coefficients coefficients);

  // y = weight * xhat + bias
  void (*normalize)(Stream stream, const TensorView& x, const NormBatches& batches,
                    Coefficients coefficients, const MutableTensorView& y);

  // Sums dy and dy * (x - mean_hi) over each slice, and uses them.
  void (*gradient_sums)(Stream stream, const TensorView& x, const TensorView& dy,
                        DeviceScratch scratch, const UseOfGradientSums& use);

  // Sums them over this rank's samples for a message, and for `own` dweight and dbias.
  void (*send_gradient_sums)(Stream stream, const TensorView& x, const TensorView& dy,
                             DeviceScratch scratch, const UseOfGradientSums& own,
                             const MessageView& message, const Header& header);

  // Uses the totals of a message.
  void (*use_gradient_sums)(Stream stream, DType x_dtype, const MessageView& message,
                            DeviceScratch scratch, const UseOfGradientSums& use);

  // dx = weight * inv_std * (dy - g1 / n - xhat * g2 / n)
  void (*input_gradient)(Stream stream, const TensorView& x, const TensorView& dy,
                         const NormBatches& batches, Coefficients coefficients,
                         const MutableTensorView& dx);

  // As the functions of Kernels that have these names do, with the coefficients of normalize.
  void (*normalize_activated)(Stream stream, const TensorView& x, const NormBatches& batches,
                              Coefficients coefficients, const ActivationFunction& activation,
                              const TensorView& residual, const MutableTensorView& y);
  void (*activation_gradient)(Stream stream, const TensorView& x, const TensorView& dy,
                              const NormBatches& batches, Coefficients coefficients,
                              const ActivationFunction& activation, const MutableTensorView& dz);
  void (*gradient_of_output)(Stream stream, const TensorView& y, const TensorView& dy,
                             const NormBatches& batches, const ActivationFunction& activation,
                             const MutableTensorView& dz);
};

// The kernels for a device's memory; nullptr if they were not built.
[[nodiscard]] const DeviceKernels* device_kernels() noexcept;

}  // namespace normscope
