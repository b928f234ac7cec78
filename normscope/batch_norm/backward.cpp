// SPDX-License-Identifier: Apache-2.0
#include "normscope/batch_norm/batch_norm.h"
#include "normscope/batch_norm/checks.h"
#include "normscope/batch_norm/norm_batch.h"
#include "normscope/kernels/channel_values.h"

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
  explicit OwnedGradientSums(std::int64_t channels)
      : channels_(channels), numbers_(static_cast<std::size_t>(2 * channels)) {}

  [[nodiscard]] GradientSums view() noexcept {
    return {numbers_.data(), numbers_.data() + channels_};
  }

  void add(const OwnedGradientSums& other) noexcept {
    for (std::size_t i = 0; i < numbers_.size(); ++i) numbers_[i] += other.numbers_[i];
  }

 private:
  std::int64_t channels_;
  std::vector<double> numbers_;
};

// dweight = g2 and dbias = g1 over this rank's samples.
void write_parameter_gradients(const BackwardArguments& arguments, GradientSums sums) {
  for (std::int64_t c = 0; c < arguments.x.channels; ++c) {
    set_channel_value(arguments.dweight, c, sums.dy_xhat[c]);
    set_channel_value(arguments.dbias, c, sums.dy[c]);
  }
}

// One slice, this rank alone: nothing between the sums and their use but the sums themselves.
void input_gradient_of_slice(const BackwardArguments& arguments, const ResolvedContext& context,
                             std::int64_t slice, Message& message, GradientSums sums) {
  const Kernels& kernels = context.kernels;
  const auto [first, last] = samples_of_slice(arguments.x.samples, arguments.slices, slice);
  const TensorView x = arguments.x.sample_range(first, last);
  const TensorView dy = arguments.dy.sample_range(first, last);
  const MutableTensorView dx = arguments.dx.sample_range(first, last);
  const Statistics statistics = statistics_of_slice(arguments.statistics, slice, x.channels);
  for_channel_chunks(
      context, x, 2, [&](std::int64_t begin, std::int64_t end, const Execution& execution) {
        const TensorView x_chunk = x.channel_range(begin, end);
        const TensorView dy_chunk = dy.channel_range(begin, end);
        const LimbsView limbs = message.limbs().channel_range(begin, end);
        const Statistics chunk_statistics = statistics.channel_range(begin);
        const GradientSums chunk_sums = sums.channel_range(begin);
        kernels.add_gradient_sums(execution, x_chunk, dy_chunk, chunk_statistics, limbs);
        kernels.finalize_gradient_sums(execution, limbs, chunk_statistics, chunk_sums);
        if (dx.data == nullptr) return;
        kernels.input_gradient(execution, x_chunk, dy_chunk, chunk_statistics,
                               arguments.weight.channel_range(begin), chunk_sums, message.count(),
                               dx.channel_range(begin, end));
      });
}

void input_gradient_of_slices(const BackwardArguments& arguments, const ResolvedContext& context) {
  const TensorView& x = arguments.x;
  OwnedGradientSums all(x.channels);
  for (std::int64_t slice = 0; slice < arguments.slices; ++slice) {
    const auto [first, last] = samples_of_slice(x.samples, arguments.slices, slice);
    Message message(x.channels, (last - first) * x.positions);
    OwnedGradientSums sums(x.channels);
    input_gradient_of_slice(arguments, context, slice, message, sums.view());
    all.add(sums);
  }
  write_parameter_gradients(arguments, all.view());
}

// Local sums, one all-reduce, finalize, apply.
void input_gradient_synchronized(const BackwardArguments& arguments, const CallLabel& label,
                                 const ResolvedContext& context) {
  const Kernels& kernels = context.kernels;
  const Execution& execution = context.execution;
  const TensorView& x = arguments.x;
  const Statistics statistics = statistics_of_slice(arguments.statistics, 0, x.channels);
  Message message(x.channels, x.elements_per_channel());
  OwnedGradientSums sums(x.channels);
  kernels.add_gradient_sums(execution, x, arguments.dy, statistics, message.limbs());
  kernels.finalize_gradient_sums(execution, message.limbs(), statistics, sums.view());
  write_parameter_gradients(arguments, sums.view());
  context.exchange->all_reduce(label, message.numbers(), execution.stream);
  if (arguments.dx.data == nullptr) return;
  kernels.finalize_gradient_sums(execution, message.limbs(), statistics, sums.view());
  kernels.input_gradient(execution, x, arguments.dy, statistics, arguments.weight, sums.view(),
                         message.count(), arguments.dx);
}

}  // namespace

void batch_norm_backward(const BackwardArguments& arguments, const CallContext& context) {
  check_or_fail(context, [&] { check(arguments, context); });
  const ResolvedContext resolved = resolve(context);
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
