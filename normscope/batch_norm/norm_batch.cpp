// SPDX-License-Identifier: Apache-2.0
#include "normscope/batch_norm/norm_batch.h"

#include <algorithm>
#include <string>

#include "normscope/core/error.h"

namespace normscope {

Numbers::Numbers(ResolvedContext& context, std::int64_t size, Contents contents)
    : context_(context) {
  if (context.kernels.memory() == Memory::kHost) {
    of_host_.resize(static_cast<std::size_t>(size));
    numbers_ = of_host_;
  } else {
    numbers_ = {context.workspace, static_cast<std::size_t>(size)};
    context.workspace += size;
    if (contents == Contents::kZeros) {
      context.kernels.clear(context.execution, numbers_.data(), size);
    }
  }
}

Numbers::~Numbers() {
  if (context_.kernels.memory() == Memory::kDevice) context_.workspace = numbers_.data();
}

Count Message::all_reduce(const CallLabel& label, double count,
                          const ResolvedContext& context) const {
  const std::span<double> numbers = numbers_.span();
  const std::span<double> header = numbers.last(kHeaderSize);
  const Stream stream = context.execution.stream;
  if (context.kernels.memory() == Memory::kHost) {
    header[kCount] = count;
    context.exchange->all_reduce(label, numbers, stream);
    return {.known = header[kCount]};
  }
  const int call =
      context.exchange->all_reduce_on_device(label, count, numbers, stream, [&](const Header& own) {
        context.kernels.seal(context.execution, limbs(), own, header.data());
      });
  return {.totals = header.data(),
          .ranks = context.exchange->communicator().size(),
          .report = context.report,
          .call = call};
}

void clear(LimbsView limbs) noexcept {
  for (int sum = 0; sum < kSums; ++sum) {
    for (int k = 0; k < kLimbs; ++k) std::fill_n(limbs.limb(sum, k), limbs.channels, 0.0);
  }
}

ResolvedContext resolve(const CallContext& context) {
  static const Execution kThisThread;
  return {context.kernels == nullptr ? default_kernels() : *context.kernels,
          context.execution == nullptr ? kThisThread : *context.execution,
          context.exchange != nullptr && context.exchange->sends() ? context.exchange : nullptr,
          context.workspace, context.report};
}

std::int64_t slice_count(std::int64_t samples, std::int64_t wanted) {
  if (wanted < 1) {
    throw ArgumentError("slices: expected at least 1, got " + std::to_string(wanted));
  }
  if (samples == 0) return 1;
  const std::int64_t size = (samples + wanted - 1) / wanted;
  return (samples + size - 1) / size;
}

SampleRange samples_of_slice(std::int64_t samples, std::int64_t slices,
                             std::int64_t slice) noexcept {
  const std::int64_t size = (samples + slices - 1) / slices;
  return {std::min(slice * size, samples), std::min((slice + 1) * size, samples)};
}

}  // namespace normscope
