// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include "normscope/batch_norm/exchange.h"
#include "normscope/core/activation.h"
#include "normscope/core/attributes.h"
#include "normscope/core/execution.h"
#include "normscope/core/message_view.h"
#include "normscope/core/tensor_view.h"
#include "normscope/kernels/device_kernels.h"
#include "normscope/kernels/kernels.h"

namespace normscope NORMSCOPE_EXPORT {

// The device that a call runs on. Work is queued on the stream and nothing waits for it. Errors
// that the device finds are thrown by the next call with the same report.
struct DeviceContext {
  const DeviceKernels* kernels = nullptr;
  Stream stream = {};
  // workspace_size() doubles in device memory, aligned to 64 bytes. Calls on one stream can share
  // them, if no other thread queues work there during a call.
  double* workspace = nullptr;
  // device_scratch_size() doubles in device memory: zero before a call, and zero again after it.
  // Calls on one stream can share them; a graph needs its own.
  double* scratch = nullptr;
  DeviceReport* report = nullptr;  // required if there is an exchange
};

// Where a call runs and with which ranks it shares statistics.
struct CallContext {
  const DeviceContext* device = nullptr;  // nullptr: the host, with the next two fields
  const Kernels* kernels = nullptr;       // nullptr: default_kernels()
  const Execution* execution = nullptr;   // nullptr: this thread
  Exchange* exchange = nullptr;           // nullptr: this rank alone
  std::string_view layer;                 // quoted in errors
  std::string_view scope;                 // quoted in errors
};

// Sizes in doubles. DeviceContext::workspace holds a message and the coefficients of one direction.
[[nodiscard]] constexpr std::int64_t message_size(std::int64_t channels) noexcept {
  constexpr std::int64_t kAligned = 8;  // 64 bytes, in doubles
  return (limbs_size(channels) + kHeaderSize + kAligned - 1) / kAligned * kAligned;
}
[[nodiscard]] constexpr std::int64_t workspace_size(std::int64_t channels,
                                                    std::int64_t slices) noexcept {
  return message_size(channels) + slices * Coefficients::kInputGradient * channels;
}

// How many slices a batch of `samples` is cut into if `wanted` are requested. As in torch.chunk,
// there may be fewer, and the last one may be smaller. Throws ArgumentError if `wanted` is below 1.
[[nodiscard]] std::int64_t slice_count(std::int64_t samples, std::int64_t wanted);

struct ForwardArguments {
  TensorView x;  // [N, C, *]
  // [N, C, *], x's dtype and layout, in memory of its own. data nullptr: not wanted; allowed only
  // if `coefficients` is given.
  MutableTensorView y;
  ChannelView weight = {};     // [C] float32 or x's dtype; none: ones
  ChannelView bias = {};       // [C] float32 or x's dtype; none: zeros
  RunningUpdate running = {};  // [C] float32 or x's dtype
  RunningAverage running_average = RunningAverage::kExponential;
  double eps = 1e-5;        // >= 0
  std::int64_t slices = 1;  // as returned by slice_count(); more than one excludes an exchange
  SliceStats slice_stats = SliceStats::kPooled;
  BackwardNeeded backward = BackwardNeeded::kYes;
  ActivationFunction activation = {};  // applied to y; kNone: y is the normalized x
  // [N, C, *], x's dtype and layout: added before the activation, which must satisfy
  // output_tells_gradient(). data nullptr: none.
  TensorView residual = {};
  double* statistics = nullptr;  // out [slices, 3, C]: mean_hi, mean_lo, inv_std
  double* counts = nullptr;      // out [slices]: elements per channel; nullptr: not wanted
  // In/out, for batch_norm_finalize(): the moments of the norm batch are added to it: with several
  // slices, those of all slices, or of the first one for kFirst. data nullptr: not wanted.
  MessageView accumulated = {};
  // Out [slices, 4, C]: the coefficients of y, for callers that apply them; none: not wanted.
  Coefficients coefficients = {};
};

// Training forward: y = activation(weight * (x - mean) * inv_std + bias + residual) over the norm
// batch. Also updates the running statistics, and writes what backward needs. Takes one all-reduce
// if the exchange has several ranks. An empty norm batch updates nothing.
//
// Throws ArgumentError before anything is updated or sent. Whatever it throws, nothing has been
// updated; unless all ranks throw it, the exchange is then marked as failed.
// Throws OneValueError if the norm batch has one element per channel, and the errors of
// Exchange::all_reduce().
//
// On a device, all pointers except the report point to device memory. If the device finds that the
// ranks disagree, or that together they have one element per channel, then all outputs (including
// counts) are NaN, the running statistics are unchanged, and the next call throws MismatchError or
// OneValueError. Throws DeviceError if the device refuses a launch.
void batch_norm_forward(const ForwardArguments& arguments, const CallContext& context);

struct WithStatisticsArguments {
  TensorView x;                        // [N, C, *]
  MutableTensorView y;                 // [N, C, *], as in forward
  ChannelView weight = {};             // [C]; none: ones
  ChannelView bias = {};               // [C]; none: zeros
  const double* statistics = nullptr;  // [slices, 3, C], from forward
  std::int64_t slices = 1;
  ActivationFunction activation = {};  // as in forward
  TensorView residual = {};            // as in forward
};

// Recomputes forward's y bit for bit from the statistics that forward returned. Nothing is sent.
//
// Throws ArgumentError.
void batch_norm_with_statistics(const WithStatisticsArguments& arguments,
                                const CallContext& context);

struct BackwardArguments {
  TensorView x;                        // [N, C, *]
  TensorView dy;                       // [N, C, *], x's dtype and layout
  MutableTensorView dx;                // [N, C, *], as y; data nullptr: not wanted
  ChannelView weight = {};             // [C]; none: ones
  const double* statistics = nullptr;  // [slices, 3, C], from forward
  std::int64_t slices = 1;
  ActivationFunction activation = {};  // as in forward
  ChannelView bias = {};               // as in forward; needed only with an activation
  TensorView y = {};                   // [N, C, *] forward's y, if it had a residual
  // Out [N, C, *], as dx: the gradient before the activation, which is also the residual's
  // gradient. Required if needs_dz(); otherwise it may be absent, which saves a sweep. Without an
  // activation it would equal dy, and is not written.
  MutableTensorView dz = {};
  MutableChannelView dweight = {};  // out [C] this rank's sum(dy * xhat); none: not wanted
  MutableChannelView dbias = {};    // out [C] this rank's sum(dy); none: not wanted
  // Out [slices, 5, C]: the coefficients of dx, for callers that apply them; none: not wanted.
  Coefficients coefficients = {};
};

// Whether BackwardArguments::dz is required.
[[nodiscard]] constexpr bool needs_dz(const ActivationFunction& activation, bool has_residual,
                                      bool is_on_device) noexcept {
  if (activation.kind == Activation::kNone) return false;
  return has_residual || is_on_device || !activation.is_clip();
}

// Training backward: dx over the norm batch, dweight and dbias over this rank's samples. Takes one
// all-reduce if the exchange has several ranks. It does so even if this rank wants no dx, because
// its peers may.
//
// Throws as batch_norm_forward does.
void batch_norm_backward(const BackwardArguments& arguments, const CallContext& context);

}  // namespace normscope
