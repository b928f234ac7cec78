// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "normscope/comm/calls.h"
#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// Hooks that a program installs around exchanges, for example to profile them or to handle signals.
// One observer per process; every thread that exchanges calls it.
class CallObserver {
 public:
  virtual ~CallObserver() = default;

  // Around an exchange, including its waits.
  virtual void begin_call(const CallName& name, std::string_view scope, std::size_t bytes) = 0;
  virtual void end_call() noexcept = 0;

  // Around a wait for the peers within an exchange.
  virtual void begin_wait() = 0;
  virtual void end_wait() noexcept = 0;

  // Called about every 100 ms during a wait; `who_is_where` returns what each rank is doing. An
  // exception from this function ends the wait and marks the group as failed.
  virtual void during_wait(std::chrono::steady_clock::duration waited,
                           const std::function<std::string()>& who_is_where) = 0;
};

// Sets the observer, or removes it (nullptr). It must outlive all exchanges that begin while it is
// set.
void observe_calls(CallObserver* observer) noexcept;
[[nodiscard]] CallObserver* call_observer() noexcept;

// Calls the observer's during_wait(), if there is one. If that throws, calls interrupted() before
// the exception goes on.
template <class Interrupted>
void notify_observer(std::chrono::steady_clock::duration waited,
                     const std::function<std::string()>& who_is_where,
                     const Interrupted& interrupted) {
  CallObserver* const observer = call_observer();
  if (observer == nullptr) return;
  try {
    observer->during_wait(waited, who_is_where);
  } catch (...) {
    interrupted();
    throw;
  }
}

// Reports a wait to the observer for the lifetime of this object.
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
