// SPDX-License-Identifier: Apache-2.0
#include <optional>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/batch_norm/checks.h"
#include "normscope/batch_norm/norm_batch.h"

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
  check_channel_dtype("weight", arguments.weight.dtype, arguments.x);
  check_channel_dtype("dweight", arguments.dweight.dtype, arguments.x);
  check_channel_dtype("dbias", arguments.dbias.dtype, arguments.x);
  check_slices(arguments.slices, arguments.x, context);
}

// Gradient sums of their own for all channels.
class OwnedGradientSums {
 public:
  OwnedGradientSums(ResolvedContext& context, std::int64_t channels, Contents contents)
      : channels_(channels), numbers_(context, 2 * channels, contents) {}

  [[nodiscard]] GradientSums view() const noexcept {
    return {numbers_.span().data(), numbers_.span().data() + channels_};
  }

 private:
  std::int64_t channels_;
  Numbers numbers_;
};

// Channels of a slice, this rank alone: nothing between the sums and their use but the sums
// themselves.
void input_gradient_of_part(const BackwardArguments& arguments, const Kernels& kernels,
                            const SlicePart& part, const Execution& execution,
                            const GradientResults& of_slice) {
  const TensorView x = part.of(arguments.x);
  const TensorView dy = part.of(arguments.dy);
  const Count count{.known = static_cast<double>(x.elements_per_channel())};
  const Statistics statistics =
      statistics_of_slice(arguments.statistics, part.slice, arguments.x.channels)
          .channel_range(part.begin);
  const GradientResults results = of_slice.channel_range(part.begin);
  kernels.add_gradient_sums(execution, x, dy, statistics, part.limbs);
  kernels.finalize_gradient_sums(execution, part.limbs, count, statistics, results);
  if (arguments.dx.data == nullptr) return;
  kernels.input_gradient(execution, x, dy, statistics, arguments.weight.channel_range(part.begin),
                         results.sums, count, part.of(arguments.dx));
}

void input_gradient_of_slices(const BackwardArguments& arguments, ResolvedContext& context) {
  const OwnedGradientSums sums(context, arguments.x.channels, Contents::kAnything);
  std::optional<OwnedGradientSums> all;
  if (arguments.slices > 1) all.emplace(context, arguments.x.channels, Contents::kZeros);
  const GradientResults results{.sums = sums.view(),
                                .all = all ? all->view() : GradientSums{},
                                .dweight = arguments.dweight,
                                .dbias = arguments.dbias};
  struct Nothing {};
  for_slice_parts(
      context, arguments.x, arguments.slices, 2, [](std::int64_t) { return Nothing{}; },
      [&](const SlicePart& part, const Execution& execution, Nothing) {
        input_gradient_of_part(arguments, context.kernels, part, execution, results);
      });
}

// Local sums, one all-reduce, finalize, apply.
void input_gradient_synchronized(const BackwardArguments& arguments, const CallLabel& label,
                                 ResolvedContext& context) {
  const Kernels& kernels = context.kernels;
  const Execution& execution = context.execution;
  const TensorView& x = arguments.x;
  const auto own_count = static_cast<double>(x.elements_per_channel());
  const Statistics statistics = statistics_of_slice(arguments.statistics, 0, x.channels);
  const Message message(context, x.channels);
  const OwnedGradientSums sums(context, x.channels, Contents::kAnything);
  kernels.add_gradient_sums(execution, x, arguments.dy, statistics, message.limbs());
  kernels.finalize_gradient_sums(
      execution, message.limbs(), {.known = own_count}, statistics,
      {.sums = sums.view(), .dweight = arguments.dweight, .dbias = arguments.dbias});
  const Count count = message.all_reduce(label, own_count, context);
  // Also where nobody wants the totals: on a device they say whether the ranks disagreed.
  kernels.finalize_gradient_sums(execution, message.limbs(), count, statistics,
                                 {.sums = sums.view()});
  if (arguments.dx.data == nullptr) return;
  kernels.input_gradient(execution, x, arguments.dy, statistics, arguments.weight, sums.view(),
                         count, arguments.dx);
}

}  // namespace

void batch_norm_backward(const BackwardArguments& arguments, const CallContext& context) {
  check_or_fail(context, [&] { check(arguments, context); });
  ResolvedContext resolved = resolve(context);
  if (resolved.exchange != nullptr) {
    const CallLabel label{.layer = context.layer,
                          .scope = context.scope,
                          .direction = Direction::kBackward,
                          .channels = arguments.x.channels};
    input_gradient_synchronized(arguments, label, resolved);
    return;
  }
  input_gradient_of_slices(arguments, resolved);
}

}  // namespace normscope
