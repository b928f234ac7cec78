// SPDX-License-Identifier: Apache-2.0
#include "normscope/batch_norm/context.h"

namespace normscope {

ResolvedContext resolve(const CallContext& context) {
  static const Execution kThisThread;
  return {context.kernels == nullptr ? default_kernels() : *context.kernels,
          context.execution == nullptr ? kThisThread : *context.execution, exchange_of(context)};
}

Exchange* exchange_of(const CallContext& context) {
  return context.exchange != nullptr && context.exchange->sends() ? context.exchange : nullptr;
}

}  // namespace normscope
