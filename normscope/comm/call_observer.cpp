// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/call_observer.h"

#include <atomic>

namespace normscope {
namespace {

constinit std::atomic<CallObserver*> current = nullptr;

}  // namespace

void observe_calls(CallObserver* observer) noexcept { current = observer; }

CallObserver* call_observer() noexcept { return current.load(std::memory_order_acquire); }

}  // namespace normscope
