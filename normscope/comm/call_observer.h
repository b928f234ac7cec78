// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "normscope/comm/calls.h"
#include "normscope/core/export.h"

namespace normscope NORMSCOPE_EXPORT {

// What a program does while its ranks exchange, such as profile them, or look for signals. One for
// the process, called by every thread that exchanges.
class CallObserver {
 public:
  virtual ~CallObserver() = default;

  // An exchange, around its waiting.
  virtual void begin_call(const CallName& name, std::string_view scope, std::size_t bytes) = 0;
  virtual void end_call() noexcept = 0;

  // The wait for the peers within it.
  virtual void begin_wait() = 0;
  virtual void end_wait() noexcept = 0;

  // About every 100 ms, while a wait lasts; `who_is_where` tells whom it is for. What this throws
  // ends the wait, and the group counts as failed.
  virtual void during_wait(std::chrono::steady_clock::duration waited,
                           const std::function<std::string()>& who_is_where) = 0;
};

// nullptr for none; it must outlive all exchanges that begin while it is set.
void observe_calls(CallObserver* observer) noexcept;
[[nodiscard]] CallObserver* call_observer() noexcept;

// Tells the observer of a wait, while this lives.
class ObservedWait {
 public:
  ObservedWait() : observer_(call_observer()) {
    if (observer_ != nullptr) observer_->begin_wait();
  }
  ObservedWait(const ObservedWait&) = delete;
  ObservedWait& operator=(const ObservedWait&) = delete;
  ~ObservedWait() {
    if (observer_ != nullptr) observer_->end_wait();
  }

 private:
  CallObserver* observer_;
};

}  // namespace normscope
