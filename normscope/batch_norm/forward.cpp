// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <string>
#include <vector>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/batch_norm/buffers.h"
#include "normscope/batch_norm/call.h"
#include "normscope/batch_norm/coefficients.h"
#include "normscope/batch_norm/parts.h"
#include "normscope/batch_norm/staged_buffers.h"
#include "normscope/core/error.h"

namespace normscope {
namespace {

void check(const ForwardArguments& arguments, const CallContext& context) {
  check_input(arguments.x);
  if (arguments.y.data != nullptr || arguments.coefficients.data == nullptr) {
    check_like_input("y", arguments.y.read_only(), arguments.x);
    check_own_memory("y", arguments.y.read_only(), "x", arguments.x);
    check_own_memory("y", arguments.y.read_only(), "residual", arguments.residual);
  }
  check_channel_dtype("weight", arguments.weight.dtype, arguments.x);
  check_channel_dtype("bias", arguments.bias.dtype, arguments.x);
  check_channel_dtype("running_mean", arguments.running.mean.dtype, arguments.x);
  check_channel_dtype("running_var", arguments.running.var.dtype, arguments.x);
  check_activation(arguments.activation, "residual", arguments.residual, arguments.x);
  check_slices(arguments.slices, arguments.x, context);
  check_running(arguments.running, arguments.running_average);
  if (!(arguments.eps >= 0.0)) {
    throw ArgumentError("eps: expected at least 0, got " + std::to_string(arguments.eps));
  }
}

double compared_momentum(const ForwardArguments& arguments) {
  const bool is_cumulative = arguments.running_average == RunningAverage::kCumulative;
  return is_cumulative ? kCumulativeAverage : arguments.running.momentum;
}

AffineActivation affine_of(const ForwardArguments& arguments) {
  return {arguments.weight, arguments.bias, arguments.activation};
}

WantedCoefficients coefficients_of(const ForwardArguments& arguments) {
  return {arguments.coefficients, arguments.x.dtype, arguments.x.channels};
}

// The steps for some channels of a slice: moments, exchange, finalize, normalize. exchange(count)
// replaces the part's limbs by their totals over the ranks, and returns that of the count.
template <class ExchangeSums>
void normalize_part(const ForwardArguments& arguments, const Kernels& kernels,
                    const Execution& execution, const SlicePart& part, const RunningUpdate& running,
                    LimbsView pooled, const ExchangeSums& exchange) {
  const TensorView x = part.of(arguments.x);
  const MomentsResults of_slice{
      .statistics = statistics_of_slice(arguments.statistics, part.slice, arguments.x.channels),
      .running = running,
      .pooled = pooled,
      .count = arguments.counts == nullptr ? nullptr : arguments.counts + part.slice};
  const MomentsResults results = of_slice.channel_range(part.begin, part.end);
  kernels.add_moments(execution, x, part.limbs);
  const double count = exchange(static_cast<double>(x.elements_per_channel()));
  kernels.finalize_moments(execution, part.limbs, count, arguments.eps, x.dtype, results);
  const Statistics statistics = results.statistics.read_only();
  const AffineActivation affine = affine_of(arguments).channel_range(part.begin);
  coefficients_of(arguments).write_normalize(part.slice, part.begin, x.channels, statistics,
                                             affine.weight, affine.bias);
  if (arguments.y.data == nullptr) return;
  kernels.normalize(execution, x, statistics, affine, part.of(arguments.residual),
                    part.of(arguments.y));
}

LimbsView accumulated_limbs(const ForwardArguments& arguments) {
  return arguments.accumulated.data == nullptr ? LimbsView{} : arguments.accumulated.limbs();
}

void accumulate_count(const ForwardArguments& arguments, double count) {
  if (arguments.accumulated.data != nullptr) arguments.accumulated.header()[kCount] += count;
}

// Updates the running statistics with the moments of all slices together.
void update_running_with_all(const ForwardArguments& arguments, const ResolvedContext& context,
                             const RunningUpdate& running, LimbsView all) {
  const TensorView& x = arguments.x;
  std::vector<double> unused(static_cast<std::size_t>(statistics_size(1, x.channels)));
  context.kernels.finalize_moments(
      context.execution, all, static_cast<double>(x.elements_per_channel()), arguments.eps, x.dtype,
      {.statistics = statistics_of_slice(unused.data(), 0, x.channels),
       .running = running,
       .pooled = accumulated_limbs(arguments)});
}

// A rank alone, slice by slice.
void normalize_slices(const ForwardArguments& arguments, const ResolvedContext& context) {
  const TensorView& x = arguments.x;
  const bool pools = arguments.slice_stats == SliceStats::kPooled && arguments.slices > 1;
  const RunningUpdates running(arguments);
  std::optional<Message> all;
  if (pools) all.emplace(x.channels);
  const bool only_first = arguments.slice_stats == SliceStats::kFirst;
  const auto updates_with = [&](std::int64_t slice) { return !only_first || slice == 0; };
  const auto running_of = [&](std::int64_t slice) {
    return !pools && updates_with(slice) ? running.after(slice) : RunningUpdate{};
  };
  const auto pooled_of = [&](std::int64_t slice) {
    if (pools) return all->limbs();
    return updates_with(slice) ? accumulated_limbs(arguments) : LimbsView{};
  };
  const int inputs = arguments.residual.data == nullptr ? 1 : 2;
  Message message(x.channels);
  for_slice_parts(context, x, arguments.slices, inputs, message.limbs(),
                  [&](const SlicePart& part, const Execution& execution) {
                    normalize_part(arguments, context.kernels, execution, part,
                                   running_of(part.slice), pooled_of(part.slice),
                                   [](double count) { return count; });
                  });
  if (pools) update_running_with_all(arguments, context, running.after(0), all->limbs());
  const auto [first, last] =
      samples_of_slice(x.samples, only_first ? arguments.slices : 1, /*slice=*/0);
  accumulate_count(arguments, static_cast<double>((last - first) * x.positions));
}

// Several ranks, with one all-reduce.
void normalize_synchronized(const ForwardArguments& arguments, const CallLabel& label,
                            const ResolvedContext& context) {
  Message message(arguments.x.channels);
  normalize_part(arguments, context.kernels, context.execution, whole(arguments.x, message.limbs()),
                 RunningUpdates(arguments).after(0), accumulated_limbs(arguments),
                 [&](double own_count) {
                   const double count = message.all_reduce(label, own_count, *context.exchange);
                   check_count(count);
                   accumulate_count(arguments, count);
                   return count;
                 });
}

// Both paths on a device: the kernel that sums also finalizes, or writes a message for the
// exchange.
void run_on_device(const ForwardArguments& arguments, const CallLabel& label,
                   const DeviceContext& device, Exchange* exchange) {
  const DeviceKernels& kernels = *device.kernels;
  const TensorView& x = arguments.x;
  DeviceStep step(device, x, arguments.slices, arguments.coefficients);
  UseOfMoments use{.batches = step.batches,
                   .eps = arguments.eps,
                   .weight = arguments.weight,
                   .bias = arguments.bias,
                   .running = arguments.running,
                   .running_average = arguments.running_average,
                   .slice_stats = arguments.slice_stats,
                   .statistics = arguments.statistics,
                   .counts = arguments.counts,
                   .accumulated = arguments.accumulated,
                   .coefficients = step.coefficients};
  if (exchange == nullptr) {
    kernels.moments(device.stream, x, step.scratch, use);
  } else {
    use.batches = step.all_reduce(*exchange, label, [&](const Header& header) {
      kernels.send_moments(device.stream, x, step.scratch, step.message, header);
    });
    kernels.use_moments(device.stream, x.dtype, step.message, step.scratch, use);
  }
  if (arguments.y.data == nullptr) return;
  kernels.normalize(device.stream, x, step.batches, step.coefficients, arguments.activation,
                    arguments.residual, arguments.y);
}

void run(const ForwardArguments& arguments, const CallContext& context) {
  throw_reported(context);
  check_device(context);
  check(arguments, context);
  const CallLabel label{.layer = context.layer,
                        .scope = context.scope,
                        .direction = Direction::kForward,
                        .channels = arguments.x.channels,
                        .dtype = name_of(arguments.x.dtype),
                        .backward = arguments.backward,
                        .eps = arguments.eps,
                        .momentum = compared_momentum(arguments)};
  Exchange* exchange = exchange_of(context);
  if (exchange == nullptr) {
    const auto [first, last] =
        samples_of_slice(arguments.x.samples, arguments.slices, arguments.slices - 1);
    check_count(static_cast<double>((last - first) * arguments.x.positions));
  }
  if (context.device != nullptr) {
    run_on_device(arguments, label, *context.device, exchange);
    return;
  }
  StagedBuffers staged(arguments);
  if (exchange != nullptr) {
    normalize_synchronized(staged.arguments(), label, resolve(context));
  } else {
    normalize_slices(staged.arguments(), resolve(context));
  }
  staged.commit();
}

void normalize_on_device(const ForwardArguments& arguments, const double* statistics,
                         const DeviceContext& device) {
  const TensorView& x = arguments.x;
  const DeviceStep step(device, x, arguments.slices);
  device.kernels->use_statistics(device.stream, x.dtype, x.channels, arguments.slices, statistics,
                                 arguments.weight, arguments.bias, step.coefficients);
  device.kernels->normalize(device.stream, x, step.batches, step.coefficients, arguments.activation,
                            arguments.residual, arguments.y);
}

}  // namespace

void batch_norm_forward(const ForwardArguments& arguments, const CallContext& context) {
  run_or_tell_peers(context.exchange, [&] { run(arguments, context); });
}

void batch_norm_with_statistics(const WithStatisticsArguments& arguments,
                                const CallContext& context) {
  const TensorView& x = arguments.x;
  // As a forward that has its statistics.
  const ForwardArguments forward{.x = x,
                                 .y = arguments.y,
                                 .weight = arguments.weight,
                                 .bias = arguments.bias,
                                 .slices = arguments.slices,
                                 .activation = arguments.activation,
                                 .residual = arguments.residual};
  check_device(context);
  check(forward, context);
  if (context.device != nullptr) {
    normalize_on_device(forward, arguments.statistics, *context.device);
    return;
  }
  const ResolvedContext resolved = resolve(context);
  for (std::int64_t slice = 0; slice < arguments.slices; ++slice) {
    const auto [first, last] = samples_of_slice(x.samples, arguments.slices, slice);
    resolved.kernels.normalize(resolved.execution, x.sample_range(first, last),
                               statistics_of_slice(arguments.statistics, slice, x.channels),
                               affine_of(forward), arguments.residual.sample_range(first, last),
                               arguments.y.sample_range(first, last));
  }
}

}  // namespace normscope
