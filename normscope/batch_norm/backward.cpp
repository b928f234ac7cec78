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

// One slice, this rank alone: nothing between the sums and their use but the sums themselves.
void input_gradient_of_slice(const BackwardArguments& arguments, ResolvedContext& context,
                             std::int64_t slice, const GradientResults& results) {
  const Kernels& kernels = context.kernels;
  const auto [first, last] = samples_of_slice(arguments.x.samples, arguments.slices, slice);
  const TensorView x = arguments.x.sample_range(first, last);
  const TensorView dy = arguments.dy.sample_range(first, last);
  const MutableTensorView dx = arguments.dx.sample_range(first, last);
  const Count count{.known = static_cast<double>(x.elements_per_channel())};
  const Statistics statistics = statistics_of_slice(arguments.statistics, slice, x.channels);
  const Message message(context, x.channels);
  for_channel_chunks(
      context, x, 2, [&](std::int64_t begin, std::int64_t end, const Execution& execution) {
        const TensorView x_chunk = x.channel_range(begin, end);
        const TensorView dy_chunk = dy.channel_range(begin, end);
        const LimbsView limbs = message.limbs().channel_range(begin, end);
        const Statistics chunk_statistics = statistics.channel_range(begin);
        const GradientResults chunk_results = results.channel_range(begin);
        kernels.add_gradient_sums(execution, x_chunk, dy_chunk, chunk_statistics, limbs);
        kernels.finalize_gradient_sums(execution, limbs, count, chunk_statistics, chunk_results);
        if (dx.data == nullptr) return;
        kernels.input_gradient(execution, x_chunk, dy_chunk, chunk_statistics,
                               arguments.weight.channel_range(begin), chunk_results.sums, count,
                               dx.channel_range(begin, end));
      });
}

void input_gradient_of_slices(const BackwardArguments& arguments, ResolvedContext& context) {
  const OwnedGradientSums sums(context, arguments.x.channels, Contents::kAnything);
  std::optional<OwnedGradientSums> all;
  if (arguments.slices > 1) all.emplace(context, arguments.x.channels, Contents::kZeros);
  const GradientResults results{.sums = sums.view(),
                                .all = all ? all->view() : GradientSums{},
                                .dweight = arguments.dweight,
                                .dbias = arguments.dbias};
  for (std::int64_t slice = 0; slice < arguments.slices; ++slice) {
    input_gradient_of_slice(arguments, context, slice, results);
  }
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
