// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <vector>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/batch_norm/buffers.h"
#include "normscope/batch_norm/call.h"
#include "normscope/batch_norm/coefficients.h"
#include "normscope/batch_norm/slices.h"
#include "normscope/batch_norm/staged_buffers.h"
#include "normscope/kernels/finalize.h"

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
  if (arguments.accumulated.data != nullptr) {
    check_message("accumulated", arguments.accumulated, arguments.x.channels);
  }
  check_eps(arguments.eps);
}

double compared_momentum(const ForwardArguments& arguments) {
  const bool is_cumulative = arguments.running_average == RunningAverage::kCumulative;
  return is_cumulative ? kCumulativeAverage : arguments.running.momentum;
}

AffineActivation affine_of(const ForwardArguments& arguments) {
  return {arguments.weight, arguments.bias, arguments.activation};
}

void normalize(const ForwardArguments& arguments, Statistics statistics,
               const ResolvedContext& context, const Slice& slice) {
  context.kernels.normalize(context.execution, slice.of(arguments.x), statistics,
                            affine_of(arguments), slice.of(arguments.residual),
                            slice.of(arguments.y));
}

void normalize(const ForwardArguments& arguments, const DeviceStep& step) {
  const DeviceContext& device = step.device;
  device.kernels->normalize(device.stream, arguments.x, step.batches, step.coefficients,
                            arguments.activation, arguments.residual, arguments.y);
}

// The steps for a slice, or for a rank's part of the norm batch: moments, exchange, finalize,
// normalize. Returns the number of elements per channel of the norm batch.
double normalize_slice(const ForwardArguments& arguments, const CallLabel& label,
                       const ResolvedContext& context, const Slice& slice, Message& message,
                       const RunningUpdate& running, LimbsView pooled) {
  const auto& [kernels, execution, exchange] = context;
  const TensorView x = slice.of(arguments.x);
  const MutableStatistics statistics =
      statistics_of_slice(arguments.statistics, slice.index, x.channels);
  auto count = static_cast<double>(x.elements_per_channel());
  kernels.add_moments(execution, x, message.limbs());
  if (exchange != nullptr) {
    count = message.all_reduce(label, count, *exchange);
    check_count(count);
  }
  kernels.finalize_moments(
      execution, message.limbs(), count, arguments.eps, x.dtype,
      {.statistics = statistics,
       .running = running,
       .pooled = pooled,
       .count = arguments.counts == nullptr ? nullptr : arguments.counts + slice.index});
  write_coefficients(arguments.coefficients, slice.index, x, [&]<class Real>(std::int64_t c) {
    return normalize_coefficients<Real>(statistics.read_only(), arguments.weight, arguments.bias,
                                        c);
  });
  if (arguments.y.data != nullptr) normalize(arguments, statistics.read_only(), context, slice);
  return count;
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
       .pooled = arguments.accumulated.limbs()});
}

// Slice by slice; with ranks there is one, which they share.
void run_on_host(const ForwardArguments& arguments, const CallLabel& label,
                 const ResolvedContext& context) {
  const TensorView& x = arguments.x;
  const bool pools = arguments.slice_stats == SliceStats::kPooled && arguments.slices > 1;
  const bool only_first = arguments.slice_stats == SliceStats::kFirst;
  const RunningUpdates running(arguments);
  Message message(x.channels);
  std::optional<Message> all;
  if (pools) all.emplace(x.channels);
  double counted = 0.0;  // per channel, in the running statistics
  for (std::int64_t i = 0; i < arguments.slices; ++i) {
    if (i > 0) clear(message.limbs());
    const bool updates = !only_first || i == 0;
    const LimbsView into = updates ? arguments.accumulated.limbs() : LimbsView{};
    const double count = normalize_slice(
        arguments, label, context, slice_of(x.samples, arguments.slices, i), message,
        updates && !pools ? running.after(i) : RunningUpdate{}, pools ? all->limbs() : into);
    if (updates) counted += count;
  }
  if (pools) update_running_with_all(arguments, context, running.after(0), all->limbs());
  if (arguments.accumulated.data != nullptr) arguments.accumulated.header()[kCount] += counted;
}

// All paths on a device: the kernel that sums also finalizes, after an exchange if its peers can be
// reached, or writes a message for the exchange.
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
  // The kernel that sums may write y if nothing but coefficients is applied.
  const bool is_plain = arguments.activation.kind == Activation::kNone;
  const MutableTensorView y = is_plain ? arguments.y : MutableTensorView{};
  bool is_written = false;
  if (exchange == nullptr) {
    is_written = kernels.moments(device.stream, x, step.scratch, use, y);
  } else {
    const auto sum = [&](const Header& header, const PeerMemory* peers) {
      if (peers != nullptr) {
        is_written = kernels.exchange_moments(device.stream, x, step.scratch, use, y, step.message,
                                              header, *peers);
      } else {
        kernels.send_moments(device.stream, x, step.scratch, step.message, header);
      }
    };
    if (!step.sum_over_ranks(*exchange, label, use.batches, sum)) {
      kernels.use_moments(device.stream, x.dtype, step.message, step.scratch, use);
    }
  }
  if (arguments.y.data != nullptr && !is_written) normalize(arguments, step);
}

void run(const ForwardArguments& arguments, const CallContext& context) {
  throw_reported(context);
  check_context(context);
  check(arguments, context);
  check_statistics(arguments.statistics, arguments.slices, arguments.x.channels);
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
    // Before anything is written.
    const Slice smallest = slice_of(arguments.x.samples, arguments.slices, arguments.slices - 1);
    check_count(static_cast<double>(smallest.of(arguments.x).elements_per_channel()));
  }
  if (context.device != nullptr) {
    run_on_device(arguments, label, *context.device, exchange);
    return;
  }
  StagedBuffers staged(arguments);
  run_on_host(staged.arguments(), label, resolve(context));
  staged.commit();
}

}  // namespace

void batch_norm_forward(const ForwardArguments& arguments, const CallContext& context) {
  run_or_notify_peers(context.exchange, [&] { run(arguments, context); });
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
  check_context(context);
  check(forward, context);
  check_statistics(arguments.statistics, arguments.slices, x.channels);
  if (context.device != nullptr) {
    const DeviceStep step(*context.device, x, arguments.slices);
    step.device.kernels->use_statistics(step.device.stream, x.dtype, x.channels, arguments.slices,
                                        arguments.statistics, arguments.weight, arguments.bias,
                                        step.coefficients);
    normalize(forward, step);
    return;
  }
  const ResolvedContext resolved = resolve(context);
  for (std::int64_t i = 0; i < arguments.slices; ++i) {
    normalize(forward, statistics_of_slice(arguments.statistics, i, x.channels), resolved,
              slice_of(x.samples, arguments.slices, i));
  }
}

}  // namespace normscope
