// SPDX-License-Identifier: Apache-2.0
#include <optional>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/batch_norm/checks.h"
#include "normscope/batch_norm/coefficients.h"
#include "normscope/batch_norm/context.h"
#include "normscope/batch_norm/device_step.h"
#include "normscope/batch_norm/message.h"
#include "normscope/batch_norm/parts.h"
#include "normscope/core/aligned_vector.h"

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

WantedCoefficients coefficients_of(const BackwardArguments& arguments) {
  return {arguments.coefficients, arguments.x.dtype, arguments.x.channels};
}

// Gradient sums of their own for all channels.
class OwnedGradientSums {
 public:
  explicit OwnedGradientSums(std::int64_t channels)
      : channels_(channels), numbers_(static_cast<std::size_t>(2 * channels)) {}

  [[nodiscard]] GradientSums view() noexcept {
    return {numbers_.data(), numbers_.data() + channels_};
  }

 private:
  std::int64_t channels_;
  AlignedVector<double> numbers_;
};

// Single-rank path: sums, finalizes and applies some channels of a slice while they are in cache.
void input_gradient_of_part(const BackwardArguments& arguments, const Kernels& kernels,
                            const SlicePart& part, const Execution& execution,
                            const GradientResults& of_slice) {
  const TensorView x = part.of(arguments.x);
  const TensorView dy = part.of(arguments.dy);
  const Statistics statistics =
      statistics_of_slice(arguments.statistics, part.slice, arguments.x.channels)
          .channel_range(part.begin);
  const GradientResults results = of_slice.channel_range(part.begin);
  kernels.add_gradient_sums(execution, x, dy, statistics, part.limbs);
  kernels.finalize_gradient_sums(execution, part.limbs, statistics, results);
  const ChannelView weight = arguments.weight.channel_range(part.begin);
  const auto count = static_cast<double>(x.elements_per_channel());
  coefficients_of(arguments).write_input_gradient(part.slice, part.begin, x.channels, statistics,
                                                  weight, results.sums, count);
  if (arguments.dx.data == nullptr) return;
  kernels.input_gradient(execution, x, dy, statistics, weight, results.sums, count,
                         part.of(arguments.dx));
}

void input_gradient_of_slices(const BackwardArguments& arguments, const ResolvedContext& context) {
  OwnedGradientSums sums(arguments.x.channels);
  std::optional<OwnedGradientSums> all;
  if (arguments.slices > 1) all.emplace(arguments.x.channels);
  const GradientResults results{.sums = sums.view(),
                                .all = all ? all->view() : GradientSums{},
                                .dweight = arguments.dweight,
                                .dbias = arguments.dbias};
  for_slice_parts(context, arguments.x, arguments.slices, 2,
                  [&](const SlicePart& part, const Execution& execution) {
                    input_gradient_of_part(arguments, context.kernels, part, execution, results);
                  });
}

// Local sums, one all-reduce, finalize, apply.
void input_gradient_synchronized(const BackwardArguments& arguments, const CallLabel& label,
                                 const ResolvedContext& context) {
  const Kernels& kernels = context.kernels;
  const Execution& execution = context.execution;
  const TensorView& x = arguments.x;
  const auto own_count = static_cast<double>(x.elements_per_channel());
  const Statistics statistics = statistics_of_slice(arguments.statistics, 0, x.channels);
  Message message(x.channels);
  OwnedGradientSums sums(x.channels);
  kernels.add_gradient_sums(execution, x, arguments.dy, statistics, message.limbs());
  kernels.finalize_gradient_sums(
      execution, message.limbs(), statistics,
      {.sums = sums.view(), .dweight = arguments.dweight, .dbias = arguments.dbias});
  const double count = message.all_reduce(label, own_count, *context.exchange);
  if (arguments.dx.data == nullptr && arguments.coefficients.data == nullptr) return;
  kernels.finalize_gradient_sums(execution, message.limbs(), statistics, {.sums = sums.view()});
  coefficients_of(arguments).write_input_gradient(0, 0, x.channels, statistics, arguments.weight,
                                                  sums.view(), count);
  if (arguments.dx.data == nullptr) return;
  kernels.input_gradient(execution, x, arguments.dy, statistics, arguments.weight, sums.view(),
                         count, arguments.dx);
}

// The same two on a device: the kernel of the sums uses them, or makes a message of them.
void input_gradient_on_device(const BackwardArguments& arguments, const CallLabel& label,
                              const DeviceContext& device, Exchange* exchange) {
  const DeviceKernels& kernels = *device.kernels;
  const TensorView& x = arguments.x;
  const TensorView& dy = arguments.dy;
  DeviceStep step(device, x, arguments.slices, arguments.coefficients);
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
    // Also if nobody wants dx: the totals say whether the ranks disagreed.
    kernels.use_gradient_sums(device.stream, x.dtype, step.message, step.scratch, use);
  }
  if (arguments.dx.data == nullptr) return;
  kernels.input_gradient(device.stream, x, dy, step.batches, step.coefficients, arguments.dx);
}

}  // namespace

void batch_norm_backward(const BackwardArguments& arguments, const CallContext& context) {
  check_or_fail(context, [&] { check(arguments, context); });
  const CallLabel label{.layer = context.layer,
                        .scope = context.scope,
                        .direction = Direction::kBackward,
                        .channels = arguments.x.channels};
  Exchange* exchange = exchange_of(context);
  if (context.device != nullptr) {
    input_gradient_on_device(arguments, label, *context.device, exchange);
  } else if (exchange != nullptr) {
    input_gradient_synchronized(arguments, label, resolve(context));
  } else {
    input_gradient_of_slices(arguments, resolve(context));
  }
}

}  // namespace normscope
