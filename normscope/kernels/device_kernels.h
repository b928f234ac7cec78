// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "normscope/core/activation.h"
#include "normscope/core/attributes.h"
#include "normscope/core/header.h"
#include "normscope/core/limbs.h"
#include "normscope/core/message_view.h"
#include "normscope/core/peer_memory.h"
#include "normscope/core/stream.h"
#include "normscope/core/tensor_view.h"
#include "normscope/kernels/kernels.h"

namespace normscope NORMSCOPE_EXPORT {

// Errors that a device finds while the host does not wait for it. Stored in host memory that the
// device can write (pinned and mapped). The fields keep their values until the host clears them.
struct DeviceReport {
  int mismatch = 0;   // not 0: the number of the call in which the ranks did not match
  int one_value = 0;  // not 0: the number of the call whose norm batch had one value per channel
};

// How many places there are to add the sums of a slice, if there are so many slices: many blocks
// that add to one place wait for each other. Blocks of other slices add elsewhere.
inline constexpr int kPlaces = 4;
[[nodiscard]] NORMSCOPE_INLINE constexpr int places_of_sums(std::int64_t slices) noexcept {
  return slices <= kPlaces ? kPlaces : 1;
}

// Device memory that is zero between calls. Blocks add their sums there, and count the finished
// blocks. Calls on one stream can share it.
struct DeviceScratch {
  double* data = nullptr;  // device_scratch_size()
  std::int64_t channels = 0;
  std::int64_t slices = 1;

  // The sums of one slice at one of its places.
  [[nodiscard]] NORMSCOPE_INLINE LimbsView limbs(std::int64_t slice,
                                                 std::int64_t place) const noexcept {
    const std::int64_t index = slice * places_of_sums(slices) + place;
    return {data + index * kSums * kLimbs * channels, channels, channels};
  }

  // Counters of finished blocks: [0] for the whole grid, [1 + i] for its column i, of at most
  // max(channels, 1) columns.
  [[nodiscard]] NORMSCOPE_INLINE unsigned* tickets() const noexcept {
    return reinterpret_cast<unsigned*>(data +
                                       slices * places_of_sums(slices) * kSums * kLimbs * channels);
  }
};

// The size of DeviceScratch::data in doubles.
[[nodiscard]] constexpr std::int64_t device_scratch_size(std::int64_t channels,
                                                         std::int64_t slices) noexcept {
  const std::int64_t tickets = 1 + std::max<std::int64_t>(channels, 1);
  return slices * places_of_sums(slices) * limbs_size(channels) + (tickets + 1) / 2;
}

// The norm batches of a call: slices of this rank's batch, or one norm batch shared by several
// ranks.
struct NormBatches {
  std::int64_t samples = 0;     // of this rank
  std::int64_t positions = 0;   // per sample
  std::int64_t slices = 1;      // as in torch.chunk: of slice_size samples, the last may have fewer
  std::int64_t slice_size = 0;  // samples

  // The message's header after the all-reduce, in device memory; nullptr: no other rank shares.
  const double* totals = nullptr;
  int ranks = 1;
  DeviceReport* report = nullptr;
  int call = 0;  // the number that report_error() writes

  [[nodiscard]] NORMSCOPE_INLINE std::int64_t first_sample(std::int64_t slice) const noexcept {
    return slice * slice_size;
  }
  [[nodiscard]] NORMSCOPE_INLINE std::int64_t samples_of(std::int64_t slice) const noexcept {
    const std::int64_t left = samples - first_sample(slice);
    return left < slice_size ? left : slice_size;
  }

  // The elements per channel of a norm batch. NaN if the ranks disagree, or if there is one value,
  // which has no variance. The NaN then spreads to all results.
  [[nodiscard]] NORMSCOPE_INLINE double count(std::int64_t slice) const noexcept {
    return totals == nullptr ? static_cast<double>(samples_of(slice) * positions)
                             : count_of(totals);
  }
  // The same for the totals of a header.
  [[nodiscard]] NORMSCOPE_INLINE double count_of(const double* of_header) const noexcept {
    const bool is_good = ranks_agree(of_header, ranks) && of_header[kCount] != 1.0;
    return is_good ? of_header[kCount] : std::numeric_limits<double>::quiet_NaN();
  }

  // Reports why count() is NaN, if there is a report. An exchange that has failed leaves NaN, which
  // the communicator reports.
  NORMSCOPE_INLINE void report_error() const noexcept {
    if (totals == nullptr || report == nullptr || totals[kCount] != totals[kCount]) return;
    if (!ranks_agree(totals, ranks)) {
      report->mismatch = call;
    } else if (totals[kCount] == 1.0) {
      report->one_value = call;
    }
  }
};

// The slices of a whole batch that no other rank shares.
[[nodiscard]] constexpr NormBatches norm_batches(const TensorView& x,
                                                 std::int64_t slices) noexcept {
  return {.samples = x.samples,
          .positions = x.positions,
          .slices = slices,
          .slice_size = (x.samples + slices - 1) / slices};
}

// The coefficients of the formulas of core/formulas.h, per channel: [slices, ., C] with
// `kNormalize` or `kInputGradient` numbers. They are rounded once to the type of x's arithmetic,
// which saves every thread the conversion.
struct Coefficients {
  static constexpr std::int64_t kNormalize = 4;      // mean_hi, mean_lo, scale, bias
  static constexpr std::int64_t kInputGradient = 5;  // mean_hi, mean_lo, scale, mean_dy, slope

  void* data = nullptr;  // aligned to 64 bytes
};

// Forward's results from the moments of x.
struct UseOfMoments {
  NormBatches batches = {};
  double eps = 0.0;
  ChannelView weight = {};
  ChannelView bias = {};
  RunningUpdate running = {};
  RunningAverage running_average = RunningAverage::kExponential;
  SliceStats slice_stats = SliceStats::kPooled;
  double* statistics = nullptr;    // out [slices, 3, C]: mean_hi, mean_lo, inv_std
  double* counts = nullptr;        // out [slices]; nullptr: not wanted
  MessageView accumulated = {};    // += the moments; none: not wanted
  Coefficients coefficients = {};  // out, for normalize
};

// Backward's results from the gradient sums.
struct UseOfGradientSums {
  NormBatches batches = {};
  const double* statistics = nullptr;  // [slices, 3, C], from forward
  ChannelView weight = {};
  MutableChannelView dweight = {};  // out [C] sum(dy * xhat) over all slices; none: not wanted
  MutableChannelView dbias = {};    // out [C] sum(dy) over all slices; none: not wanted
  Coefficients coefficients = {};   // out, for input_gradient; none: not wanted
};

// By which another process of the host finds memory of a device.
using PeerHandle = std::array<std::byte, 64>;

// What a device offers to ranks that exchange sums in PeerMemory. All memory is zero, and never
// freed: a peer may still use it. Functions throw DeviceError.
struct PeerFunctions {
  // Allocates [size] on the current device, and the handle for other processes.
  double* (*allocate)(std::int64_t size, PeerHandle& handle);

  // The allocation of another process, as the current device sees it.
  double* (*open)(const PeerHandle& handle);

  // Allocates a word in host memory that devices can write.
  std::uint64_t* (*allocate_word)();

  // Work that is queued on `later` from now on waits for that on `earlier`.
  void (*order)(Stream earlier, Stream later);
};

// One backend for device memory, which the host cannot access. Each function queues one kernel on
// the stream and does not wait: a launch takes longer than the arithmetic of a small layer. Views,
// layouts and shapes are as for Kernels; tensors may be empty. Throws DeviceError.
struct DeviceKernels {
  std::string_view name;

  // Why the calling thread's current device cannot run it; empty if it can.
  std::string (*why_not)();

  // Whether the stream is being captured into a graph.
  bool (*is_capturing)(Stream stream);

  // Allocates [size] zeros on the current device, aligned to 64 bytes, for kernels on the stream
  // that leave zeros. They are never freed; but if the stream is being captured, they are used
  // again when the graph is destroyed.
  double* (*new_zeros)(Stream stream, std::int64_t size);

  // Sums x and x^2 over each slice, and finalizes. Writes y = weight * xhat + bias too if that
  // takes no other kernel; returns whether it has. y without data: not wanted.
  bool (*moments)(Stream stream, const TensorView& x, DeviceScratch scratch,
                  const UseOfMoments& use, const MutableTensorView& y);

  // Sums x and x^2 over this rank's samples into a message: canonical limbs, then the header.
  void (*send_moments)(Stream stream, const TensorView& x, DeviceScratch scratch,
                       const MessageView& message, const Header& header);

  // Does what send_moments, a sum over the ranks and use_moments do: the kernel exchanges the sums
  // with those of its peers. y as for moments. Only the totals of the header are written to the
  // message, which must be those of use.batches. There must be a channel, and one slice. Such
  // kernels of one rank must run one after the other.
  bool (*exchange_moments)(Stream stream, const TensorView& x, DeviceScratch scratch,
                           const UseOfMoments& use, const MutableTensorView& y,
                           const MessageView& message, const Header& header,
                           const PeerMemory& peers);

  // Finalizes from the totals of a message.
  void (*use_moments)(Stream stream, DType x_dtype, const MessageView& message,
                      DeviceScratch scratch, const UseOfMoments& use);

  // Computes the coefficients from existing statistics.
  void (*use_statistics)(Stream stream, DType x_dtype, std::int64_t channels, std::int64_t slices,
                         const double* statistics, ChannelView weight, ChannelView bias,
                         Coefficients coefficients);

  // y = activation(weight * xhat + bias + residual), as normalize of Kernels
  void (*normalize)(Stream stream, const TensorView& x, const NormBatches& batches,
                    Coefficients coefficients, const ActivationFunction& activation,
                    const TensorView& residual, const MutableTensorView& y);

  // Sums dy and dy * (x - mean_hi) over each slice, and finalizes. Writes dx as input_gradient if
  // that takes no other kernel; returns whether it has. dx without data: not wanted.
  bool (*gradient_sums)(Stream stream, const TensorView& x, const TensorView& dy,
                        DeviceScratch scratch, const UseOfGradientSums& use,
                        const MutableTensorView& dx);

  // Sums them over this rank's samples into a message; writes only the dweight and dbias of `use`.
  void (*send_gradient_sums)(Stream stream, const TensorView& x, const TensorView& dy,
                             DeviceScratch scratch, const UseOfGradientSums& use,
                             const MessageView& message, const Header& header);

  // The same with an exchange as that of exchange_moments, dx as for gradient_sums. dweight and
  // dbias are of this rank.
  bool (*exchange_gradient_sums)(Stream stream, const TensorView& x, const TensorView& dy,
                                 DeviceScratch scratch, const UseOfGradientSums& use,
                                 const MutableTensorView& dx, const MessageView& message,
                                 const Header& header, const PeerMemory& peers);

  // Finalizes from the totals of a message.
  void (*use_gradient_sums)(Stream stream, DType x_dtype, const MessageView& message,
                            DeviceScratch scratch, const UseOfGradientSums& use);

  // dx = weight * inv_std * (dy - g1 / n - xhat * g2 / n)
  void (*input_gradient)(Stream stream, const TensorView& x, const TensorView& dy,
                         const NormBatches& batches, Coefficients coefficients,
                         const MutableTensorView& dx);

  // The same as the functions of Kernels with these names, with the coefficients of normalize.
  void (*activation_gradient)(Stream stream, const TensorView& x, const TensorView& dy,
                              const NormBatches& batches, Coefficients coefficients,
                              const ActivationFunction& activation, const MutableTensorView& dz);
  void (*gradient_of_output)(Stream stream, const TensorView& y, const TensorView& dy,
                             const NormBatches& batches, const ActivationFunction& activation,
                             const MutableTensorView& dz);

  PeerFunctions peers;
};

// The kernels for device memory; nullptr if they were not built.
[[nodiscard]] const DeviceKernels* device_kernels() noexcept;

}  // namespace normscope
