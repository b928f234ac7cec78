// SPDX-License-Identifier: Apache-2.0
#include "normscope/batch_norm/batch_norm.h"
#include "normscope/batch_norm/checks.h"
#include "normscope/batch_norm/norm_batch.h"

namespace normscope {
namespace {

void check(const ApplyArguments& arguments, const CallContext& context) {
  check_input(arguments.x);
  check_like_input("y", arguments.y.read_only(), arguments.x);
  check_own_memory("y", arguments.y.read_only(), "x", arguments.x);
  check_channel_dtype("weight", arguments.weight.dtype, arguments.x);
  check_channel_dtype("bias", arguments.bias.dtype, arguments.x);
  check_slices(arguments.slices, arguments.x, context);
}

}  // namespace

void batch_norm_apply(const ApplyArguments& arguments, const CallContext& context) {
  check(arguments, context);
  const ResolvedContext resolved = resolve(context);
  const TensorView& x = arguments.x;
  for (std::int64_t slice = 0; slice < arguments.slices; ++slice) {
    const auto [first, last] = samples_of_slice(x.samples, arguments.slices, slice);
    resolved.kernels.normalize(resolved.execution, x.sample_range(first, last),
                               statistics_of_slice(arguments.statistics, slice, x.channels),
                               arguments.weight, arguments.bias,
                               arguments.y.sample_range(first, last));
  }
}

}  // namespace normscope
