// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/batch_norm/batch_norm.h"

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

}  // namespace normscope
