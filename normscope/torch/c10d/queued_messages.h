// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Event.h>

namespace normscope::binding {

// Messages that were queued on a device and may not have ended: how long they have been there.
class QueuedMessages {
 public:
  using Clock = std::chrono::steady_clock;

  // Calls queue(), which queues a message on the current stream of the device. It also counts as
  // queued while queue() waits for the peers, but not if queue() throws.
  void add(c10::Device device, const std::function<void()>& queue);

  // Of the oldest message that has not ended; nullopt: all have. Any thread may ask.
  [[nodiscard]] std::optional<Clock::duration> age();

 private:
  struct Message {
    Clock::time_point begin;
    std::optional<c10::Event> end;  // nullopt: queue() has not returned
  };

  [[nodiscard]] c10::Event event_on(c10::Device device);
  void forget_what_has_ended();

  std::mutex mutex_;  // guards the rest
  std::deque<Message> messages_;
  std::vector<c10::Event> unused_;
};

}  // namespace normscope::binding
