// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>

namespace normscope::binding {

// Looks, in a thread of its own, whether exchanges have failed. If they are only queued on a
// device, nothing else notices.
class PeerWatch {
 public:
  // Calls look() every half a second, until it returns why exchanges have failed, and then
  // on_failure(reason); both again if there was no memory. Calls end_work() after a further pause:
  // what a peer did before it ended has then arrived.
  PeerWatch(std::function<std::optional<std::string>()> look,
            std::function<void(const std::string&)> on_failure, std::function<void()> end_work);
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;
  ~PeerWatch() = default;

 private:
  void run(const std::stop_token& stop);
  [[nodiscard]] bool pause(const std::stop_token& stop);

  std::function<std::optional<std::string>()> look_;
  std::function<void(const std::string&)> on_failure_;
  std::function<void()> end_work_;
  std::mutex of_pause_;
  std::condition_variable_any wake_;
  std::jthread thread_;  // last, because it uses the other members
};

}  // namespace normscope::binding
