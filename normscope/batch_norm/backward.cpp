// SPDX-License-Identifier: Apache-2.0
#include <optional>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/batch_norm/buffers.h"
#include "normscope/batch_norm/call.h"
#include "normscope/batch_norm/coefficients.h"
#include "normscope/batch_norm/parts.h"

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
}

WantedCoefficients coefficients_of(const BackwardArguments& arguments) {
  return {arguments.coefficients, arguments.x.dtype, arguments.x.channels};
}

// What the sweeps over a part read: dy, and the function of xhat whose output has this gradient.
struct OutputGradient {
  TensorView dy;
  AffineActivation affine;
};

// With an activation there are two ways. Either dz is written here and takes the place of dy, or
// each sweep computes dz from dy on the fly and nothing stores it.
OutputGradient output_gradient(const BackwardArguments& arguments, const Kernels& kernels,
                               const Execution& execution, const SlicePart& part,
                               Statistics statistics) {
  const TensorView dy = part.of(arguments.dy);
  const AffineActivation affine =
      AffineActivation{arguments.weight, arguments.bias, arguments.activation}.channel_range(
          part.begin);
  if (affine.activation.kind == Activation::kNone || arguments.dz.data == nullptr) {
    return {dy, affine};
  }
  const MutableTensorView dz = part.of(arguments.dz);
  if (arguments.y.data != nullptr) {
    kernels.gradient_of_output(execution, part.of(arguments.y), dy, affine.activation, dz);
  } else {
    kernels.activation_gradient(execution, part.of(arguments.x), dy, statistics, affine, dz);
  }
  return {dz.read_only(), {affine.weight, affine.bias}};
}

// The steps for some channels of a slice: gradient sums, exchange, input gradient. exchange(count)
// replaces the gradient sums by their totals over the ranks, and returns that of the count.
template <class ExchangeSums>
void input_gradient_of_part(const BackwardArguments& arguments, const Kernels& kernels,
                            const Execution& execution, const SlicePart& part,
                            const GradientResults& of_slice, const ExchangeSums& exchange) {
  const TensorView x = part.of(arguments.x);
  const Statistics statistics =
      statistics_of_slice(arguments.statistics, part.slice, arguments.x.channels)
          .channel_range(part.begin);
  const GradientResults results = of_slice.channel_range(part.begin);
  const auto [dy, affine] = output_gradient(arguments, kernels, execution, part, statistics);
  kernels.add_gradient_sums(execution, x, dy, statistics, affine, part.limbs);
  kernels.finalize_gradient_sums(execution, part.limbs, statistics, results);
  const double count = exchange(static_cast<double>(x.elements_per_channel()));
  coefficients_of(arguments).write_input_gradient(part.slice, part.begin, x.channels, statistics,
                                                  affine.weight, results.sums, count);
  if (arguments.dx.data == nullptr) return;
  kernels.input_gradient(execution, x, dy, statistics, affine, results.sums, count,
                         part.of(arguments.dx));
}

GradientSums gradient_sums_in(Message& message, std::int64_t channels) {
  return {message.results(), message.results() + channels};
}

// A rank alone, slice by slice.
void input_gradient_of_slices(const BackwardArguments& arguments, const ResolvedContext& context) {
  const std::int64_t channels = arguments.x.channels;
  Message message(channels, /*results=*/2 * channels);
  std::optional<OwnedGradientSums> all;
  if (arguments.slices > 1) all.emplace(channels);
  const GradientResults results{.sums = gradient_sums_in(message, channels),
                                .all = all ? all->view() : GradientSums{},
                                .dweight = arguments.dweight,
                                .dbias = arguments.dbias};
  const int tensors = arguments.dz.data == nullptr ? 2 : 3;
  for_slice_parts(context, arguments.x, arguments.slices, tensors, message.limbs(),
                  [&](const SlicePart& part, const Execution& execution) {
                    input_gradient_of_part(arguments, context.kernels, execution, part, results,
                                           [](double count) { return count; });
                  });
}

// Several ranks, with one all-reduce.
void input_gradient_synchronized(const BackwardArguments& arguments, const CallLabel& label,
                                 const ResolvedContext& context) {
  const TensorView& x = arguments.x;
  Message message(x.channels, /*results=*/2 * x.channels);
  const GradientSums sums = gradient_sums_in(message, x.channels);
  const bool is_wanted = arguments.dx.data != nullptr || arguments.coefficients.data != nullptr;
  const auto exchange = [&](double own_count) {
    const double count = message.all_reduce(label, own_count, *context.exchange);
    if (is_wanted) {
      context.kernels.finalize_gradient_sums(
          context.execution, message.limbs(),
          statistics_of_slice(arguments.statistics, 0, x.channels), {.sums = sums});
    }
    return count;
  };
  input_gradient_of_part(arguments, context.kernels, context.execution, whole(x, message.limbs()),
                         {.sums = sums, .dweight = arguments.dweight, .dbias = arguments.dbias},
                         exchange);
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

// Both paths on a device: the kernel that sums also finalizes, or writes a message for the
// exchange.
void input_gradient_on_device(const BackwardArguments& arguments, const CallLabel& label,
                              const DeviceContext& device, Exchange* exchange) {
  const DeviceKernels& kernels = *device.kernels;
  const TensorView& x = arguments.x;
  DeviceStep step(device, x, arguments.slices, arguments.coefficients);
  const TensorView dy = gradient_before_activation(arguments, step);
  const UseOfGradientSums own{.batches = step.batches,
                              .statistics = arguments.statistics,
                              .dweight = arguments.dweight,
                              .dbias = arguments.dbias};
  UseOfGradientSums use{.batches = step.batches,
                        .statistics = arguments.statistics,
                        .weight = arguments.weight,
                        .coefficients = step.coefficients};
  if (exchange == nullptr) {
    use.dweight = arguments.dweight;
    use.dbias = arguments.dbias;
    kernels.gradient_sums(device.stream, x, dy, step.scratch, use);
  } else {
    use.batches = step.all_reduce(*exchange, label, [&](const Header& header) {
      kernels.send_gradient_sums(device.stream, x, dy, step.scratch, own, step.message, header);
    });
    // Even if dx is not wanted: the totals tell whether the ranks disagreed.
    kernels.use_gradient_sums(device.stream, x.dtype, step.message, step.scratch, use);
  }
  if (arguments.dx.data == nullptr) return;
  kernels.input_gradient(device.stream, x, dy, step.batches, step.coefficients, arguments.dx);
}

void run(const BackwardArguments& arguments, const CallContext& context) {
  throw_reported(context);
  check_device(context);
  check(arguments, context);
  const CallLabel label{.layer = context.layer,
                        .scope = context.scope,
                        .direction = Direction::kBackward,
                        .channels = arguments.x.channels,
                        .dtype = name_of(arguments.x.dtype)};
  Exchange* exchange = exchange_of(context);
  if (context.device != nullptr) {
    input_gradient_on_device(arguments, label, *context.device, exchange);
  } else if (exchange != nullptr) {
    input_gradient_synchronized(arguments, label, resolve(context));
  } else {
    input_gradient_of_slices(arguments, resolve(context));
  }
}

}  // namespace

void batch_norm_backward(const BackwardArguments& arguments, const CallContext& context) {
  run_or_tell_peers(context.exchange, [&] { run(arguments, context); });
}

}  // namespace normscope
