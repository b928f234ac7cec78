// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "normscope/comm/call_observer.h"

namespace normscope::testing {

// Ends every wait, as a handler of signals may.
class Interrupting final : public CallObserver {
 public:
  Interrupting() { observe_calls(this); }
  Interrupting(const Interrupting&) = delete;
  Interrupting& operator=(const Interrupting&) = delete;
  ~Interrupting() override { observe_calls(nullptr); }

  void begin_call(const CallName& /*name*/, std::string_view /*scope*/,
                  std::size_t /*bytes*/) override {}
  void end_call() noexcept override {}
  void begin_wait() override {}
  void end_wait() noexcept override {}
  void during_wait(std::chrono::steady_clock::duration /*waited*/,
                   const std::function<std::string()>& /*who_is_where*/) override {
    throw std::domain_error("interrupted");
  }
};

}  // namespace normscope::testing
