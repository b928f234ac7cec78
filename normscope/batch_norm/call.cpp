// SPDX-License-Identifier: Apache-2.0
#include "normscope/batch_norm/call.h"

#include <atomic>
#include <string>

#include "normscope/core/error.h"
#include "normscope/core/text.h"

namespace normscope {
namespace {

std::string shape_of(const TensorView& x) {
  return std::string("[") + std::to_string(x.samples) + ", " + std::to_string(x.channels) + ", " +
         std::to_string(x.positions) + "]";
}

[[noreturn]] void refuse(std::string_view name, std::string_view expected, std::string_view got) {
  throw ArgumentError(std::string(name) + ": expected " + std::string(expected) + ", got " +
                      std::string(got));
}

template <class Error>
[[noreturn]] void throw_to_peers(Exchange& exchange, const Error& error) {
  exchange.fail(error.what());
  throw error;
}

}  // namespace

void check_input(const TensorView& x) {
  if (x.samples < 0 || x.channels < 0 || x.positions < 0) {
    refuse("x", "no negative extent", shape_of(x));
  }
  if (x.data == nullptr && !x.empty()) refuse("x", "data, or an empty tensor", "none");
  if (!x.has_kernel_layout()) {
    refuse("x", "position_stride 1 or channel_stride 1",
           std::to_string(x.position_stride) + " and " + std::to_string(x.channel_stride));
  }
}

void check_like_input(std::string_view name, const TensorView& tensor, const TensorView& x) {
  if (tensor.samples != x.samples || tensor.channels != x.channels ||
      tensor.positions != x.positions) {
    refuse(name, "the shape of x, " + shape_of(x), shape_of(tensor));
  }
  if (tensor.dtype != x.dtype) {
    refuse(name, "the dtype of x, " + std::string(name_of(x.dtype)), name_of(tensor.dtype));
  }
  if (tensor.data == nullptr && !tensor.empty()) refuse(name, "data, or an empty tensor", "none");
  if (!x.empty() && (!tensor.has_kernel_layout() || tensor.layout() != x.layout())) {
    refuse(name, "the layout of x", "another");
  }
}

void check_own_memory(std::string_view name, const TensorView& output, std::string_view input_name,
                      const TensorView& input) {
  if (output.data != nullptr && output.data == input.data) {
    refuse(name, "memory of its own", "that of " + std::string(input_name));
  }
}

void check_channel_dtype(std::string_view name, DType dtype, const TensorView& x) {
  if (dtype != DType::kFloat32 && dtype != x.dtype) {
    refuse(name, "float32 or the dtype of x, " + std::string(name_of(x.dtype)), name_of(dtype));
  }
}

void check_activation(const ActivationFunction& activation, std::string_view name,
                      const TensorView& tensor, const TensorView& x) {
  if (tensor.data == nullptr) return;
  if (!activation.output_tells_gradient()) {
    refuse(name, "none, or relu, relu6 or a leaky_relu with a slope of at least 0",
           "another activation");
  }
  check_like_input(name, tensor, x);
}

void check_statistics(const double* statistics, std::int64_t slices, std::int64_t channels) {
  const std::int64_t size = statistics_size(slices, channels);
  if (statistics == nullptr && size > 0) {
    refuse("statistics", "memory for " + std::to_string(size) + " numbers", "none");
  }
}

void check_message(std::string_view name, const MessageView& message, std::int64_t channels) {
  if (message.data != nullptr && message.channels == channels) return;
  refuse(name, std::to_string(channels) + " channels",
         message.data == nullptr ? "no data" : std::to_string(message.channels));
}

void check_eps(double eps) {
  if (!(eps >= 0.0)) refuse("eps", "at least 0", decimal(eps));
}

void check_running(const RunningUpdate& running, RunningAverage average) {
  if (average == RunningAverage::kExponential || running.updates != nullptr) return;
  refuse("running.updates", "the number of updates so far for a cumulative average", "none");
}

void check_context(const CallContext& context) {
  if (context.device == nullptr) {
    if (context.execution == nullptr) return;
    const auto& [threads, parallel_for] = *context.execution;
    if (threads < 1) refuse("threads", "at least 1", std::to_string(threads));
    if (!parallel_for) refuse("parallel_for", "a function", "none");
    return;
  }
  const DeviceContext& device = *context.device;
  if (device.kernels == nullptr) refuse("device", "kernels", "none");
  if (device.workspace == nullptr) refuse("workspace", "memory of the device", "none");
  if (device.scratch == nullptr) refuse("scratch", "zeros of the device", "none");
  if (device.report == nullptr && exchange_of(context) != nullptr) {
    refuse("report", "memory of the host that the device can write", "none");
  }
}

void throw_reported(const CallContext& context) {
  if (context.device == nullptr || context.device->report == nullptr ||
      context.exchange == nullptr) {
    return;
  }
  DeviceReport& report = *context.device->report;
  // The device may be writing concurrently.
  const auto take = [](int& call) { return std::atomic_ref(call).exchange(0); };
  const auto call_of = [&](int call) { return context.exchange->reported_call(call); };
  if (const int call = take(report.mismatch)) {
    throw_to_peers(
        *context.exchange,
        MismatchError("the ranks of a scope made different calls: this rank's " + call_of(call) +
                      " found this on its device, and its results are NaN. "
                      "NORMSCOPE_CHECK=1 finds it earlier, and says what each rank was "
                      "doing"));
  }
  if (const int call = take(report.one_value)) {
    throw_to_peers(*context.exchange,
                   OneValueError("x: expected more than 1 value per channel in the norm batch when "
                                 "training, got 1 in an earlier call, " +
                                 call_of(call) + ", whose results are NaN"));
  }
}

void check_count(double count) {
  if (count == 1.0) {
    throw OneValueError(
        "x: expected more than 1 value per channel in the norm batch when training, got 1");
  }
}

std::int64_t slice_count(std::int64_t samples, std::int64_t wanted) {
  if (wanted < 1) {
    throw ArgumentError("slices: expected at least 1, got " + std::to_string(wanted));
  }
  if (samples == 0) return 1;
  // Rounds up; (samples + wanted - 1) could overflow.
  const std::int64_t size = (samples - 1) / wanted + 1;
  return (samples - 1) / size + 1;
}

void check_slices(std::int64_t slices, const TensorView& x, const CallContext& context) {
  if (slices < 1 || slices != slice_count(x.samples, slices)) {
    refuse("slices", "a number that slice_count() gives for the samples",
           std::to_string(slices) + " for " + std::to_string(x.samples));
  }
  if (slices > 1 && context.exchange != nullptr && context.exchange->sends()) {
    refuse("slices", "1 if statistics are shared with other ranks", std::to_string(slices));
  }
}

}  // namespace normscope
