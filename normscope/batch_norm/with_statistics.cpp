// SPDX-License-Identifier: Apache-2.0
#include "normscope/batch_norm/batch_norm.h"
#include "normscope/batch_norm/buffers.h"
#include "normscope/batch_norm/checks.h"
#include "normscope/batch_norm/context.h"
#include "normscope/batch_norm/parts.h"

namespace normscope {
namespace {

void check(const WithStatisticsArguments& arguments, const CallContext& context) {
  check_device(context);
  check_input(arguments.x);
  check_like_input("y", arguments.y.read_only(), arguments.x);
  check_own_memory("y", arguments.y.read_only(), "x", arguments.x);
  check_own_memory("y", arguments.y.read_only(), "residual", arguments.residual);
  check_channel_dtype("weight", arguments.weight.dtype, arguments.x);
  check_channel_dtype("bias", arguments.bias.dtype, arguments.x);
  check_activation(arguments.activation, "residual", arguments.residual, arguments.x);
  check_slices(arguments.slices, arguments.x, context);
}

void apply_on_device(const WithStatisticsArguments& arguments, const DeviceContext& device) {
  const TensorView& x = arguments.x;
  const DeviceStep step(device, x, arguments.slices);
  device.kernels->use_statistics(device.stream, x.dtype, x.channels, arguments.slices,
                                 arguments.statistics, arguments.weight, arguments.bias,
                                 step.coefficients);
  device.kernels->normalize(device.stream, x, step.batches, step.coefficients, arguments.activation,
                            arguments.residual, arguments.y);
}

}  // namespace

void batch_norm_with_statistics(const WithStatisticsArguments& arguments,
                                const CallContext& context) {
  check(arguments, context);
  if (context.device != nullptr) {
    apply_on_device(arguments, *context.device);
    return;
  }
  const ResolvedContext resolved = resolve(context);
  const TensorView& x = arguments.x;
  for (std::int64_t slice = 0; slice < arguments.slices; ++slice) {
    const auto [first, last] = samples_of_slice(x.samples, arguments.slices, slice);
    resolved.kernels.normalize(resolved.execution, x.sample_range(first, last),
                               statistics_of_slice(arguments.statistics, slice, x.channels),
                               {arguments.weight, arguments.bias, arguments.activation},
                               arguments.residual.sample_range(first, last),
                               arguments.y.sample_range(first, last));
  }
}

}  // namespace normscope
