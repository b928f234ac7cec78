// SPDX-License-Identifier: Apache-2.0
#include "normscope/batch_norm/moments.h"

#include <algorithm>

#include "normscope/batch_norm/buffers.h"
#include "normscope/batch_norm/call.h"
#include "normscope/batch_norm/slices.h"

namespace normscope {
namespace {

Header header_of(const TensorView& x) {
  Header header;
  header.fields[kCount] = static_cast<double>(x.elements_per_channel());
  return header;
}

void check(const GradientSumsArguments& arguments) {
  check_input(arguments.x);
  check_like_input("dy", arguments.dy, arguments.x);
  check_message("sums", arguments.sums, arguments.x.channels);
  check_statistics(arguments.statistics, /*slices=*/1, arguments.x.channels);
  check_channel_dtype("dweight", arguments.dweight.dtype, arguments.x);
  check_channel_dtype("dbias", arguments.dbias.dtype, arguments.x);
}

void check(const InputGradientArguments& arguments) {
  check_input(arguments.x);
  check_like_input("dy", arguments.dy, arguments.x);
  check_like_input("dx", arguments.dx.read_only(), arguments.x);
  check_own_memory("dx", arguments.dx.read_only(), "x", arguments.x);
  check_own_memory("dx", arguments.dx.read_only(), "dy", arguments.dy);
  check_message("sums", arguments.sums, arguments.x.channels);
  check_statistics(arguments.statistics, /*slices=*/1, arguments.x.channels);
  check_channel_dtype("weight", arguments.weight.dtype, arguments.x);
}

}  // namespace

void batch_norm_moments(const TensorView& x, const MessageView& out, const CallContext& context) {
  check_context(context);
  check_input(x);
  check_message("out", out, x.channels);
  if (context.device != nullptr) {
    const DeviceStep step(*context.device, x, 1);
    context.device->kernels->send_moments(context.device->stream, x, step.scratch, out,
                                          header_of(x));
    return;
  }
  const ResolvedContext resolved = resolve(context);
  clear(out.limbs());
  resolved.kernels.add_moments(resolved.execution, x, out.limbs());
  std::ranges::copy(header_of(x).fields, out.header());
}

void batch_norm_finalize(const FinalizeArguments& arguments, const CallContext& context) {
  check_context(context);
  const std::int64_t channels = arguments.moments.channels;
  check_message("moments", arguments.moments, channels);
  const TensorView x{.dtype = arguments.x_dtype, .channels = channels};  // without data
  check_channel_dtype("running_mean", arguments.running.mean.dtype, x);
  check_channel_dtype("running_var", arguments.running.var.dtype, x);
  check_running(arguments.running, arguments.running_average);
  check_statistics(arguments.statistics, /*slices=*/1, channels);
  check_eps(arguments.eps);
  if (context.device != nullptr) {
    const DeviceStep step(*context.device, x, 1);
    context.device->kernels->use_moments(context.device->stream, x.dtype, arguments.moments,
                                         step.scratch,
                                         {.batches = {.totals = arguments.moments.header()},
                                          .eps = arguments.eps,
                                          .running = arguments.running,
                                          .running_average = arguments.running_average,
                                          .statistics = arguments.statistics,
                                          .coefficients = step.coefficients});
    return;
  }
  const double count = arguments.moments.header()[kCount];
  check_count(count);
  const ResolvedContext resolved = resolve(context);
  resolved.kernels.finalize_moments(
      resolved.execution, arguments.moments.limbs(), count, arguments.eps, x.dtype,
      {.statistics = statistics_of_slice(arguments.statistics, 0, channels),
       .running = RunningUpdates(arguments).after(0)});
}

void batch_norm_part_gradient_sums(const GradientSumsArguments& arguments,
                                   const CallContext& context) {
  check_context(context);
  check(arguments);
  const TensorView& x = arguments.x;
  if (context.device != nullptr) {
    const DeviceStep step(*context.device, x, 1);
    context.device->kernels->send_gradient_sums(context.device->stream, x, arguments.dy,
                                                step.scratch,
                                                {.batches = step.batches,
                                                 .statistics = arguments.statistics,
                                                 .dweight = arguments.dweight,
                                                 .dbias = arguments.dbias},
                                                arguments.sums, header_of(x));
    return;
  }
  const ResolvedContext resolved = resolve(context);
  const Statistics statistics = statistics_of_slice(arguments.statistics, 0, x.channels);
  OwnedGradientSums own(x.channels);
  clear(arguments.sums.limbs());
  resolved.kernels.add_gradient_sums(resolved.execution, x, arguments.dy, statistics, {},
                                     arguments.sums.limbs());
  resolved.kernels.finalize_gradient_sums(
      resolved.execution, arguments.sums.limbs(), statistics,
      {.sums = own.view(), .dweight = arguments.dweight, .dbias = arguments.dbias});
  std::ranges::copy(header_of(x).fields, arguments.sums.header());
}

void batch_norm_part_input_gradient(const InputGradientArguments& arguments,
                                    const CallContext& context) {
  check_context(context);
  check(arguments);
  const TensorView& x = arguments.x;
  if (context.device != nullptr) {
    const DeviceContext& device = *context.device;
    const DeviceStep step(device, x, 1);
    device.kernels->use_gradient_sums(device.stream, x.dtype, arguments.sums, step.scratch,
                                      {.batches = {.totals = arguments.sums.header()},
                                       .statistics = arguments.statistics,
                                       .weight = arguments.weight,
                                       .coefficients = step.coefficients});
    device.kernels->input_gradient(device.stream, x, arguments.dy, step.batches, step.coefficients,
                                   arguments.dx);
    return;
  }
  const ResolvedContext resolved = resolve(context);
  const Statistics statistics = statistics_of_slice(arguments.statistics, 0, x.channels);
  OwnedGradientSums sums(x.channels);
  resolved.kernels.finalize_gradient_sums(resolved.execution, arguments.sums.limbs(), statistics,
                                          {.sums = sums.view()});
  resolved.kernels.input_gradient(resolved.execution, x, arguments.dy, statistics,
                                  {.weight = arguments.weight}, sums.view(),
                                  arguments.sums.header()[kCount], arguments.dx);
}

}  // namespace normscope
