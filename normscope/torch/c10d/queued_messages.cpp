// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/c10d/queued_messages.h"

#include <algorithm>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>

namespace normscope::binding {
namespace {

bool has_passed(const c10::Event& event) {
  try {
    return event.query();
  } catch (const c10::Error&) {
    return true;  // the device has failed: the program's next call on it says why
  }
}

}  // namespace

std::optional<QueuedMessages::Clock::duration> QueuedMessages::age() {
  const std::lock_guard lock(mutex_);
  forget_what_has_ended();
  if (messages_.empty()) return std::nullopt;
  return Clock::now() - messages_.front().begin;
}

void QueuedMessages::add(c10::Device device, const std::function<void()>& queue) {
  {
    const std::lock_guard lock(mutex_);
    forget_what_has_ended();
    messages_.push_back({Clock::now(), std::nullopt});
  }
  try {
    queue();
    const c10::impl::VirtualGuardImpl guard(device.type());
    const std::lock_guard lock(mutex_);
    c10::Event event = event_on(device);
    event.record(guard.getStream(device));
    messages_.back().end = std::move(event);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    messages_.pop_back();
    throw;
  }
}

// An event stays on the device on which it was recorded first.
c10::Event QueuedMessages::event_on(c10::Device device) {
  const auto found = std::ranges::find(unused_, device.index(), &c10::Event::device_index);
  if (found == unused_.end()) return c10::Event(device.type());
  c10::Event event = std::move(*found);
  unused_.erase(found);
  return event;
}

// Messages on one stream end in order. Those on several may not: a later call then forgets them.
void QueuedMessages::forget_what_has_ended() {
  while (!messages_.empty() && messages_.front().end && has_passed(*messages_.front().end)) {
    unused_.push_back(std::move(*messages_.front().end));
    messages_.pop_front();
  }
}

}  // namespace normscope::binding
