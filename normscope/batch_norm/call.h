// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/core/error.h"

namespace normscope {

// Where a call runs on the host, with every default filled in.
struct ResolvedContext {
  const Kernels& kernels;
  const Execution& execution;
  Exchange* exchange;  // nullptr if nothing is sent
};

// The exchange to send with; nullptr if nothing is sent.
[[nodiscard]] inline Exchange* exchange_of(const CallContext& context) {
  return context.exchange != nullptr && context.exchange->sends() ? context.exchange : nullptr;
}

[[nodiscard]] inline ResolvedContext resolve(const CallContext& context) {
  static const Execution kThisThread;
  return {context.kernels == nullptr ? default_kernels() : *context.kernels,
          context.execution == nullptr ? kThisThread : *context.execution, exchange_of(context)};
}

// Checks shared by forward and backward. Their ArgumentError names the argument, the expected value
// and the given one.
void check_input(const TensorView& x);
void check_like_input(std::string_view name, const TensorView& tensor, const TensorView& x);
void check_own_memory(std::string_view name, const TensorView& output, std::string_view input_name,
                      const TensorView& input);
void check_channel_dtype(std::string_view name, DType dtype, const TensorView& x);
// Checks a residual, or the forward output y that replaces it in backward; data nullptr: none.
void check_activation(const ActivationFunction& activation, std::string_view name,
                      const TensorView& tensor, const TensorView& x);
// [slices, 3, C]
void check_statistics(const double* statistics, std::int64_t slices, std::int64_t channels);
void check_message(std::string_view name, const MessageView& message, std::int64_t channels);
void check_eps(double eps);
// For a cumulative average: needs the number of updates so far.
void check_running(const RunningUpdate& running, RunningAverage average);
void check_context(const CallContext& context);
// Throws OneValueError for a count of 1, since one value has no variance. With several ranks, every
// rank throws it for the same total; on a device NormBatches::count() does this check.
void check_count(double count);
void check_slices(std::int64_t slices, const TensorView& x, const CallContext& context);

// Throws the error that an earlier call found on its device, and notifies the peers: they find it
// in the next call of their own, and do not come to that of this rank.
void throw_reported(const CallContext& context);

}  // namespace normscope
