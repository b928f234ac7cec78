// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

#include "normscope/comm/call_observer.h"

namespace normscope::binding {

// Watches calls that may wait, as torch programs expect it. The profiler shows each exchange, and
// the wait within it, with layer, scope and bytes. A signal that reaches Python, such as Ctrl-C,
// ends a wait of its main thread within 100 ms. A wait as long as warning_limit() is logged once,
// in the same way as c10's warnings (TORCH_CPP_LOG_LEVEL).
class CallWatch final : public CallObserver {
 public:
  void begin_call(const CallName& name, std::string_view scope, std::size_t bytes) override;
  void end_call() noexcept override;
  void begin_wait() override;
  void end_wait() noexcept override;
  void during_wait(std::chrono::steady_clock::duration waited,
                   const std::function<std::string()>& who_is_where) override;
};

// Makes this the process's observer, unless the program has set one.
void watch_calls() noexcept;

}  // namespace normscope::binding
