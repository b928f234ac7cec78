// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include "normscope/batch_norm/exchange.h"
#include "normscope/core/activation.h"
#include "normscope/core/execution.h"
#include "normscope/core/export.h"
#include "normscope/core/message_view.h"
#include "normscope/core/tensor_view.h"
#include "normscope/kernels/device_kernels.h"
#include "normscope/kernels/kernels.h"

namespace normscope NORMSCOPE_EXPORT {

// A device that a call runs on. Work is put on the stream, and nothing waits for it, so what the
// device finds out is thrown by the next call with the same report.
struct DeviceContext {
  const DeviceKernels* kernels = nullptr;
  Stream stream = {};
  // workspace_size() doubles of the device, aligned to 64 bytes, for one call at a time.
  double* workspace = nullptr;
  // device_scratch_size() doubles of the device: zeros before a call, and again after it. Calls on
  // one stream can share them; a graph's need their own.
  double* scratch = nullptr;
  DeviceReport* report = nullptr;  // wanted if there is an exchange
};

// Where a call runs and with whom it shares statistics.
struct CallContext {
  const DeviceContext* device = nullptr;  // nullptr: the host, as the next two say
  const Kernels* kernels = nullptr;       // nullptr: default_kernels()
  const Execution* execution = nullptr;   // nullptr: this thread
  Exchange* exchange = nullptr;           // nullptr: this rank alone
  std::string_view layer;                 // for errors
  std::string_view scope;                 // for errors
};

// Doubles of DeviceContext::workspace: a message, and the coefficients of a direction.
[[nodiscard]] constexpr std::int64_t message_size(std::int64_t channels) noexcept {
  constexpr std::int64_t kAligned = 8;  // doubles of 64 bytes
  return (limbs_size(channels) + kHeaderSize + kAligned - 1) / kAligned * kAligned;
}
[[nodiscard]] constexpr std::int64_t workspace_size(std::int64_t channels,
                                                    std::int64_t slices) noexcept {
  return message_size(channels) + slices * Coefficients::kInputGradient * channels;
}

// The number of slices that a batch of `samples` splits into when `wanted` are asked for: those of
// torch.chunk, which may be fewer, the last one smaller.
[[nodiscard]] std::int64_t slice_count(std::int64_t samples, std::int64_t wanted);

struct ForwardArguments {
  TensorView x;  // [N, C, *]
  // [N, C, *], x's dtype and layout, memory of its own; data nullptr: not wanted, if there are
  // coefficients.
  MutableTensorView y;
  ChannelView weight = {};     // [C] float32 or x's dtype; none: ones
  ChannelView bias = {};       // [C] float32 or x's dtype; none: zeros
  RunningUpdate running = {};  // [C] float32 or x's dtype
  RunningAverage running_average = RunningAverage::kExponential;
  double eps = 1e-5;        // >= 0
  std::int64_t slices = 1;  // as slice_count() gives it; more than one excludes an exchange
  SliceStats slice_stats = SliceStats::kPooled;
  BackwardNeeded backward = BackwardNeeded::kYes;
  ActivationFunction activation = {};  // of y; kNone: y is what is normalized
  // [N, C, *], x's dtype and layout: added before the activation, which then has to be one that
  // output_tells_gradient(); none: nothing is added.
  TensorView residual = {};
  double* statistics = nullptr;  // out [slices, 3, C]: mean_hi, mean_lo, inv_std
  double* counts = nullptr;      // out [slices]: elements per channel; none: not wanted
  // The moments of the norm batch are added to it, for batch_norm_finalize(): of all slices, or the
  // first one's for kFirst. `data` nullptr: not wanted.
  MessageView accumulated = {};
  // Out [slices, 4, C]: those of y, for callers that apply them; none: not wanted.
  Coefficients coefficients = {};
};

// Training forward: y = activation(weight * (x - mean) * inv_std + bias + residual) over the norm
// batch, the running statistics' update, and what backward needs. One all-reduce where the exchange
// has several ranks.
//
// Throws ArgumentError before anything is updated or sent (the exchange is then marked as failed),
// and what Exchange::all_reduce throws. A norm batch of one element a channel is an ArgumentError,
// an empty one updates nothing.
//
// On a device all pointers but the report are the device's. If the ranks turn out to disagree
// there, or to have one element per channel together, all that comes out is NaN (counts too),
// running statistics stay, and the next call throws MismatchError or OneValueError. DeviceError if
// the device refuses a launch.
void batch_norm_forward(const ForwardArguments& arguments, const CallContext& context);

struct WithStatisticsArguments {
  TensorView x;                        // [N, C, *]
  MutableTensorView y;                 // [N, C, *], like forward's
  ChannelView weight = {};             // [C]; none: ones
  ChannelView bias = {};               // [C]; none: zeros
  const double* statistics = nullptr;  // [slices, 3, C], from forward
  std::int64_t slices = 1;
  ActivationFunction activation = {};  // as forward's
  TensorView residual = {};            // as forward's
};

// Forward's y once more, to the bit, from the statistics that it answered. Nothing is sent.
//
// Throws ArgumentError.
void batch_norm_with_statistics(const WithStatisticsArguments& arguments,
                                const CallContext& context);

struct BackwardArguments {
  TensorView x;                        // [N, C, *]
  TensorView dy;                       // [N, C, *], x's dtype and layout
  MutableTensorView dx;                // [N, C, *], like y; data nullptr: not wanted
  ChannelView weight = {};             // [C]; none: ones
  const double* statistics = nullptr;  // [slices, 3, C], from forward
  std::int64_t slices = 1;
  ActivationFunction activation = {};  // forward's
  ChannelView bias = {};               // forward's, if there is an activation
  TensorView y = {};                   // [N, C, *] forward's, if there was a residual
  // Out [N, C, *], like dx: the gradient before the activation, which is the residual's. There has
  // to be one if needs_dz(); if not, it may be absent, which saves a sweep.
  MutableTensorView dz = {};
  MutableChannelView dweight = {};  // out [C] this rank's sum(dy * xhat); none: not wanted
  MutableChannelView dbias = {};    // out [C] this rank's sum(dy); none: not wanted
  // Out [slices, 5, C]: those of dx, for callers that apply them; none: not wanted.
  Coefficients coefficients = {};
};

// Whether backward needs BackwardArguments::dz.
[[nodiscard]] constexpr bool needs_dz(const ActivationFunction& activation, bool has_residual,
                                      bool is_on_device) noexcept {
  if (activation.kind == Activation::kNone) return false;
  return has_residual || is_on_device || !activation.is_clip();
}

// Training backward: dx over the norm batch, dweight and dbias over this rank's samples. One
// all-reduce where the exchange has several ranks, also where this rank wants no dx, since its
// peers may.
//
// Throws as batch_norm_forward does.
void batch_norm_backward(const BackwardArguments& arguments, const CallContext& context);

}  // namespace normscope
