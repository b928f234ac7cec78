// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "normscope/torch/c10d/own_group.h"

namespace normscope::binding {

// Looks, in a thread of its own, whether a peer has failed or died. If exchanges are only queued on
// a device, nothing else notices before the backend's time limit.
class PeerWatch {
 public:
  // Calls on_failure(reason), at the latest a second after a peer has published its failure or a
  // process of this host has ended; again if there was no memory. Calls end_work() after a further
  // pause: what the peer did before it ended has then arrived.
  PeerWatch(std::shared_ptr<OwnGroup> group, std::function<void(const std::string&)> on_failure,
            std::function<void()> end_work);
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;
  ~PeerWatch() = default;

 private:
  void run(const std::stop_token& stop);
  [[nodiscard]] bool pause(const std::stop_token& stop);

  std::shared_ptr<OwnGroup> group_;
  std::function<void(const std::string&)> on_failure_;
  std::function<void()> end_work_;
  std::mutex of_pause_;
  std::condition_variable_any wake_;
  std::jthread thread_;  // last, because it uses the other members
};

}  // namespace normscope::binding
