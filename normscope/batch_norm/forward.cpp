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
        momentum_(context, is_cumulative_ ? 1 : 0, Contents::kAnything) {
    if (is_cumulative_ && is_host()) updates_before_ = *update_.updates;
  }

  // The one that comes after `earlier` others of this call. On a device the others have to be
  // queued, since the momentum is found there.
  [[nodiscard]] RunningUpdate after(std::int64_t earlier) const {
    RunningUpdate update = update_;
    if (!is_cumulative_) return update;
    if (is_host()) {
      update.momentum = cumulative_momentum(updates_before_ + earlier);
    } else {
      double* momentum = momentum_.span().data();
      context_.kernels.set_cumulative_momentum(context_.execution, update.updates, momentum);
      update.momentum_at = momentum;
    }
    return update;
  }

 private:
  [[nodiscard]] bool is_host() const noexcept { return context_.kernels.memory() == Memory::kHost; }

  RunningUpdate update_;
  bool is_cumulative_;
  const ResolvedContext& context_;
  std::int64_t updates_before_ = 0;  // this call, where the host knows
  Numbers momentum_;                 // on a device, where it does not
};

// Channels of a slice, this rank alone: nothing between the sums and their use but the sums
// themselves.
void normalize_part(const ForwardArguments& arguments, const Kernels& kernels,
                    const SlicePart& part, const Execution& execution, const RunningUpdate& running,
                    LimbsView pooled) {
  const TensorView x = part.of(arguments.x);
  const MomentsResults of_slice{
      .statistics = statistics_of_slice(arguments.statistics, part.slice, arguments.x.channels),
      .running = running,
      .pooled = pooled,
      .count = arguments.counts == nullptr ? nullptr : arguments.counts + part.slice};
  const MomentsResults results = of_slice.channel_range(part.begin, part.end);
  const Count count{.known = static_cast<double>(x.elements_per_channel())};
  kernels.add_moments(execution, x, part.limbs);
  kernels.finalize_moments(execution, part.limbs, count, arguments.eps, x.dtype, results);
  kernels.normalize(execution, x, results.statistics.read_only(),
                    arguments.weight.channel_range(part.begin),
                    arguments.bias.channel_range(part.begin), part.of(arguments.y));
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
  const auto running_of = [&](std::int64_t slice) {
    const bool updates = !pools && (arguments.slice_stats != SliceStats::kFirst || slice == 0);
    return updates ? running.after(slice) : RunningUpdate{};
  };
  for_slice_parts(
      context, x, arguments.slices, 1, running_of,
      [&](const SlicePart& part, const Execution& execution, const RunningUpdate& update) {
        normalize_part(arguments, context.kernels, part, execution, update,
                       pools ? all->limbs() : LimbsView{});
      });
  if (pools) update_running_with_all(arguments, context, running.after(0), *all);
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
      {.statistics = statistics, .running = running.after(0), .count = arguments.counts});
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
