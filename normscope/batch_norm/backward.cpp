// SPDX-License-Identifier: Apache-2.0
#include <optional>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/batch_norm/buffers.h"
#include "normscope/batch_norm/call.h"
#include "normscope/batch_norm/coefficients.h"
#include "normscope/batch_norm/slices.h"
#include "normscope/kernels/finalize.h"

namespace normscope {
namespace {

void check(const BackwardArguments& arguments, const CallContext& context) {
  check_input(arguments.x);
  check_like_input("dy", arguments.dy, arguments.x);
  if (arguments.dx.data != nullptr) {
    check_like_input("dx", arguments.dx.read_only(), arguments.x);
    check_own_memory("dx", arguments.dx.read_only(), "x", arguments.x);
    check_own_memory("dx", arguments.dx.read_only(), "dy", arguments.dy);
  }
  check_activation(arguments.activation, "y", arguments.y, arguments.x);
  const bool has_residual = arguments.y.data != nullptr;
  if (arguments.dz.data != nullptr) {
    check_like_input("dz", arguments.dz.read_only(), arguments.x);
    check_own_memory("dz", arguments.dz.read_only(), "x", arguments.x);
    check_own_memory("dz", arguments.dz.read_only(), "dy", arguments.dy);
    check_own_memory("dz", arguments.dz.read_only(), "y", arguments.y);
    check_own_memory("dx", arguments.dx.read_only(), "dz", arguments.dz.read_only());
  } else if (!arguments.x.empty() &&
             needs_dz(arguments.activation, has_residual, context.device != nullptr)) {
    throw ArgumentError("dz: expected data if needs_dz(), got none");
  }
  check_channel_dtype("bias", arguments.bias.dtype, arguments.x);
  check_channel_dtype("weight", arguments.weight.dtype, arguments.x);
  check_channel_dtype("dweight", arguments.dweight.dtype, arguments.x);
  check_channel_dtype("dbias", arguments.dbias.dtype, arguments.x);
  check_slices(arguments.slices, arguments.x, context);
  check_statistics(arguments.statistics, arguments.slices, arguments.x.channels);
}

// What the sweeps over a slice read: dy, and the function of xhat whose output has this gradient.
struct OutputGradient {
  TensorView dy;
  AffineActivation affine;
};

// With an activation there are two ways. Either dz is written here and takes the place of dy, or
// each sweep computes dz from dy on the fly and nothing stores it.
OutputGradient output_gradient(const BackwardArguments& arguments, const ResolvedContext& context,
                               const Slice& slice, Statistics statistics) {
  const auto& [kernels, execution, exchange] = context;
  const TensorView dy = slice.of(arguments.dy);
  const AffineActivation affine{arguments.weight, arguments.bias, arguments.activation};
  if (affine.activation.kind == Activation::kNone || arguments.dz.data == nullptr) {
    return {dy, affine};
  }
  const MutableTensorView dz = slice.of(arguments.dz);
  if (arguments.y.data != nullptr) {
    kernels.gradient_of_output(execution, slice.of(arguments.y), dy, affine.activation, dz);
  } else {
    kernels.activation_gradient(execution, slice.of(arguments.x), dy, statistics, affine, dz);
  }
  return {dz.read_only(), {affine.weight, affine.bias}};
}

// The steps for a slice, or for a rank's part of the norm batch: gradient sums, exchange, input
// gradient.
void input_gradient_of_slice(const BackwardArguments& arguments, const CallLabel& label,
                             const ResolvedContext& context, const Slice& slice, Message& message,
                             const GradientResults& results) {
  const auto& [kernels, execution, exchange] = context;
  const TensorView x = slice.of(arguments.x);
  const Statistics statistics = statistics_of_slice(arguments.statistics, slice.index, x.channels);
  const auto [dy, affine] = output_gradient(arguments, context, slice, statistics);
  auto count = static_cast<double>(x.elements_per_channel());
  kernels.add_gradient_sums(execution, x, dy, statistics, affine, message.limbs());
  kernels.finalize_gradient_sums(execution, message.limbs(), statistics, results);
  if (exchange != nullptr) count = message.all_reduce(label, count, *exchange);
  if (arguments.dx.data == nullptr && arguments.coefficients.data == nullptr) return;
  if (exchange != nullptr) {
    kernels.finalize_gradient_sums(execution, message.limbs(), statistics, {.sums = results.sums});
  }
  write_coefficients(arguments.coefficients, slice.index, x, [&]<class Real>(std::int64_t c) {
    return input_gradient_coefficients<Real>(statistics, arguments.weight, results.sums, count, c);
  });
  if (arguments.dx.data == nullptr) return;
  kernels.input_gradient(execution, x, dy, statistics, affine, results.sums, count,
                         slice.of(arguments.dx));
}

// Slice by slice; with ranks there is one, which they share.
void run_on_host(const BackwardArguments& arguments, const CallLabel& label,
                 const ResolvedContext& context) {
  const std::int64_t channels = arguments.x.channels;
  Message message(channels, /*results=*/2 * channels);
  std::optional<OwnedGradientSums> all;
  if (arguments.slices > 1) all.emplace(channels);
  const GradientResults results{.sums = {message.results(), message.results() + channels},
                                .all = all ? all->view() : GradientSums{},
                                .dweight = arguments.dweight,
                                .dbias = arguments.dbias};
  for (std::int64_t i = 0; i < arguments.slices; ++i) {
    if (i > 0) clear(message.limbs());
    input_gradient_of_slice(arguments, label, context,
                            slice_of(arguments.x.samples, arguments.slices, i), message, results);
  }
}

// The gradient before the activation: dy without an activation, otherwise dz, which is written
// here.
TensorView gradient_before_activation(const BackwardArguments& arguments, const DeviceStep& step) {
  const DeviceKernels& kernels = *step.device.kernels;
  const Stream stream = step.device.stream;
  const TensorView& x = arguments.x;
  if (arguments.activation.kind == Activation::kNone) return arguments.dy;
  if (arguments.y.data != nullptr) {
    kernels.gradient_of_output(stream, arguments.y, arguments.dy, step.batches,
                               arguments.activation, arguments.dz);
  } else {
    kernels.use_statistics(stream, x.dtype, x.channels, arguments.slices, arguments.statistics,
                           arguments.weight, arguments.bias, step.coefficients);
    kernels.activation_gradient(stream, x, arguments.dy, step.batches, step.coefficients,
                                arguments.activation, arguments.dz);
  }
  return arguments.dz.read_only();
}

// All paths on a device: the kernel that sums also finalizes, after an exchange if its peers can be
// reached, or writes a message for the exchange.
void run_on_device(const BackwardArguments& arguments, const CallLabel& label,
                   const DeviceContext& device, Exchange* exchange) {
  const DeviceKernels& kernels = *device.kernels;
  const TensorView& x = arguments.x;
  DeviceStep step(device, x, arguments.slices, arguments.coefficients);
  const TensorView dy = gradient_before_activation(arguments, step);
  UseOfGradientSums use{.batches = step.batches,
                        .statistics = arguments.statistics,
                        .weight = arguments.weight,
                        .dweight = arguments.dweight,
                        .dbias = arguments.dbias,
                        .coefficients = step.coefficients};
  bool is_written = false;
  if (exchange == nullptr) {
    is_written = kernels.gradient_sums(device.stream, x, dy, step.scratch, use, arguments.dx);
  } else {
    const auto sum = [&](const Header& header, const PeerMemory* peers) {
      if (peers != nullptr) {
        is_written = kernels.exchange_gradient_sums(device.stream, x, dy, step.scratch, use,
                                                    arguments.dx, step.message, header, *peers);
      } else {
        kernels.send_gradient_sums(device.stream, x, dy, step.scratch, use, step.message, header);
      }
    };
    if (!step.sum_over_ranks(*exchange, label, use.batches, sum)) {
      use.dweight = {};  // written
      use.dbias = {};
      // Even if dx is not wanted: the totals show whether the ranks disagreed.
      kernels.use_gradient_sums(device.stream, x.dtype, step.message, step.scratch, use);
    }
  }
  if (arguments.dx.data == nullptr || is_written) return;
  kernels.input_gradient(device.stream, x, dy, step.batches, step.coefficients, arguments.dx);
}

void run(const BackwardArguments& arguments, const CallContext& context) {
  throw_reported(context);
  check_context(context);
  check(arguments, context);
  const CallLabel label{.layer = context.layer,
                        .scope = context.scope,
                        .direction = Direction::kBackward,
                        .channels = arguments.x.channels,
                        .dtype = name_of(arguments.x.dtype)};
  if (context.device != nullptr) {
    run_on_device(arguments, label, *context.device, exchange_of(context));
  } else {
    run_on_host(arguments, label, resolve(context));
  }
}

}  // namespace

void batch_norm_backward(const BackwardArguments& arguments, const CallContext& context) {
  run_or_notify_peers(context.exchange, [&] { run(arguments, context); });
}

}  // namespace normscope
