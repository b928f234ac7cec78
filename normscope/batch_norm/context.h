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
[[nodiscard]] ResolvedContext resolve(const CallContext& context);

// The exchange to send with; nullptr if nothing is sent.
[[nodiscard]] Exchange* exchange_of(const CallContext& context);

}  // namespace normscope
