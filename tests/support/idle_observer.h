// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "normscope/comm/call_observer.h"

namespace normscope::testing {

// Observes exchanges during its own lifetime, and does nothing.
class IdleObserver : public CallObserver {
 public:
  IdleObserver() { observe_calls(this); }
  IdleObserver(const IdleObserver&) = delete;
  IdleObserver& operator=(const IdleObserver&) = delete;
  ~IdleObserver() override { observe_calls(nullptr); }

  void begin_call(const CallName& /*name*/, std::string_view /*scope*/,
                  std::size_t /*bytes*/) override {}
  void end_call() noexcept override {}
  void begin_wait() override {}
  void end_wait() noexcept override {}
  void during_wait(std::chrono::steady_clock::duration /*waited*/,
                   const std::function<std::string()>& /*who_is_where*/) override {}
};

}  // namespace normscope::testing
