// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <string>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/batch_norm/checks.h"
#include "normscope/batch_norm/norm_batch.h"
#include "normscope/core/error.h"

namespace normscope {
namespace {

void check(const ForwardArguments& arguments, const CallContext& context) {
  check_input(arguments.x);
  check_like_input("y", arguments.y.read_only(), arguments.x);
  check_own_memory("y", arguments.y.read_only(), "x", arguments.x);
  check_channel_dtype("weight", arguments.weight.dtype, arguments.x);
  check_channel_dtype("bias", arguments.bias.dtype, arguments.x);
  check_channel_dtype("running_mean", arguments.running.mean.dtype, arguments.x);
  check_channel_dtype("running_var", arguments.running.var.dtype, arguments.x);
  check_slices(arguments.slices, arguments.x, context);
  if (arguments.running_average == RunningAverage::kCumulative &&
      arguments.running.updates == nullptr) {
    throw ArgumentError(
        "running.updates: expected the number so far for a cumulative average, got none");
  }
  if (!(arguments.eps >= 0.0)) {
    throw ArgumentError("eps: expected at least 0, got " + std::to_string(arguments.eps));
  }
}

// A variance of one value is no variance. On several ranks all of them find this together, on a
// device by Count::value().
void check_count(double count) {
  if (count == 1.0) {
    throw OneValueError(
        "x: expected more than 1 value per channel in the norm batch when training, got 1");
  }
}

// What the updates of the running statistics are, one after the other.
class RunningUpdates {
 public:
  RunningUpdates(const ForwardArguments& arguments, ResolvedContext& context)
      : update_(arguments.running),
        is_cumulative_(arguments.running_average == RunningAverage::kCumulative),
        context_(context),
        momentum_(context, is_cumulative_ ? 1 : 0, Contents::kAnything) {}

  [[nodiscard]] RunningUpdate next() const {
    RunningUpdate update = update_;
    if (!is_cumulative_) return update;
    if (context_.kernels.memory() == Memory::kHost) {
      update.momentum = cumulative_momentum(*update.updates);
    } else {
      double* momentum = momentum_.span().data();
      context_.kernels.set_cumulative_momentum(context_.execution, update.updates, momentum);
      update.momentum_at = momentum;
    }
    return update;
  }

 private:
  RunningUpdate update_;
  bool is_cumulative_;
  const ResolvedContext& context_;
  Numbers momentum_;  // on a device, where the host does not know it
};

// One slice, this rank alone: nothing between the sums and their use but the sums themselves.
void normalize_slice(const ForwardArguments& arguments, ResolvedContext& context,
                     std::int64_t slice, const RunningUpdate& running, LimbsView pooled) {
  const Kernels& kernels = context.kernels;
  const auto [first, last] = samples_of_slice(arguments.x.samples, arguments.slices, slice);
  const TensorView x = arguments.x.sample_range(first, last);
  const MutableTensorView y = arguments.y.sample_range(first, last);
  const Count count{.known = static_cast<double>(x.elements_per_channel())};
  const MomentsResults results{
      .statistics = statistics_of_slice(arguments.statistics, slice, x.channels),
      .running = running,
      .pooled = pooled,
      .count = arguments.counts == nullptr ? nullptr : arguments.counts + slice};
  const Message message(context, x.channels);
  for_channel_chunks(
      context, x, 1, [&](std::int64_t begin, std::int64_t end, const Execution& execution) {
        const TensorView x_chunk = x.channel_range(begin, end);
        const LimbsView limbs = message.limbs().channel_range(begin, end);
        const MomentsResults chunk_results = results.channel_range(begin, end);
        kernels.add_moments(execution, x_chunk, limbs);
        kernels.finalize_moments(execution, limbs, count, arguments.eps, x.dtype, chunk_results);
        kernels.normalize(execution, x_chunk, chunk_results.statistics.read_only(),
                          arguments.weight.channel_range(begin),
                          arguments.bias.channel_range(begin), y.channel_range(begin, end));
      });
}

// The running statistics' update with the moments of all slices together.
void update_running_with_all(const ForwardArguments& arguments, ResolvedContext& context,
                             const RunningUpdate& running, const Message& all) {
  const TensorView& x = arguments.x;
  const Numbers unused(context, statistics_size(1, x.channels), Contents::kAnything);
  context.kernels.finalize_moments(
      context.execution, all.limbs(), {.known = static_cast<double>(x.elements_per_channel())},
      arguments.eps, x.dtype,
      {.statistics = statistics_of_slice(unused.span().data(), 0, x.channels), .running = running});
}

void normalize_slices(const ForwardArguments& arguments, ResolvedContext& context) {
  const TensorView& x = arguments.x;
  const bool pools = arguments.slice_stats == SliceStats::kPooled && arguments.slices > 1;
  const RunningUpdates running(arguments, context);
  std::optional<Message> all;
  if (pools) all.emplace(context, x.channels);
  for (std::int64_t slice = 0; slice < arguments.slices; ++slice) {
    const bool updates = !pools && (arguments.slice_stats != SliceStats::kFirst || slice == 0);
    normalize_slice(arguments, context, slice, updates ? running.next() : RunningUpdate{},
                    pools ? all->limbs() : LimbsView{});
  }
  if (pools) update_running_with_all(arguments, context, running.next(), *all);
}

// Local sums, one all-reduce, finalize, apply.
void normalize_synchronized(const ForwardArguments& arguments, const CallLabel& label,
                            ResolvedContext& context) {
  const Kernels& kernels = context.kernels;
  const Execution& execution = context.execution;
  const TensorView& x = arguments.x;
  const MutableStatistics statistics = statistics_of_slice(arguments.statistics, 0, x.channels);
  const RunningUpdates running(arguments, context);
  const Message message(context, x.channels);
  kernels.add_moments(execution, x, message.limbs());
  const Count count =
      message.all_reduce(label, static_cast<double>(x.elements_per_channel()), context);
  check_count(count.known);
  kernels.finalize_moments(
      execution, message.limbs(), count, arguments.eps, x.dtype,
      {.statistics = statistics, .running = running.next(), .count = arguments.counts});
  kernels.normalize(execution, x, statistics.read_only(), arguments.weight, arguments.bias,
                    arguments.y);
}

}  // namespace

void batch_norm_forward(const ForwardArguments& arguments, const CallContext& context) {
  check_or_fail(context, [&] { check(arguments, context); });
  ResolvedContext resolved = resolve(context);
  if (resolved.exchange != nullptr) {
    const CallLabel label{.layer = context.layer,
                          .scope = context.scope,
                          .direction = Direction::kForward,
                          .channels = arguments.x.channels,
                          .backward = arguments.backward};
    normalize_synchronized(arguments, label, resolved);
    return;
  }
  const auto [first, last] =
      samples_of_slice(arguments.x.samples, arguments.slices, arguments.slices - 1);
  check_count(static_cast<double>((last - first) * arguments.x.positions));
  normalize_slices(arguments, resolved);
}

}  // namespace normscope
