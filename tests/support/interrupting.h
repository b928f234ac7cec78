// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>

#include "tests/support/idle_observer.h"

namespace normscope::testing {

// Ends every wait, as a handler of signals may.
class Interrupting final : public IdleObserver {
 public:
  void during_wait(std::chrono::steady_clock::duration /*waited*/,
                   const std::function<std::string()>& /*who_is_where*/) override {
    throw std::domain_error("interrupted");
  }
};

}  // namespace normscope::testing
