// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/call_observer.h"

#include <atomic>

namespace normscope {
namespace {

std::atomic<CallObserver*>& instance() noexcept {
  static std::atomic<CallObserver*> current = nullptr;
  return current;
}

}  // namespace

void observe_calls(CallObserver* observer) noexcept { instance() = observer; }

CallObserver* call_observer() noexcept { return instance().load(std::memory_order_acquire); }

}  // namespace normscope
