// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "normscope/comm/calls.h"
#include "normscope/torch/c10d/own_group.h"

namespace normscope::binding {

// Tells ranks that share no memory what each of them is doing, through the store of their own
// group. This also shows ranks that do not come. A separate thread writes to the store, but only
// once this rank's latest call is `after` old: a program without long waits sends nothing.
class CallPublisher {
 public:
  CallPublisher(std::shared_ptr<OwnGroup> group, CallBoard board, std::chrono::milliseconds after);
  CallPublisher(const CallPublisher&) = delete;
  CallPublisher& operator=(const CallPublisher&) = delete;

  // Publishes this rank's call now, and puts on the board what the others have published.
  void publish() noexcept;

 private:
  [[nodiscard]] bool is_published(const RankCall& call);
  void publish_old_call();

  std::shared_ptr<OwnGroup> group_;
  CallBoard board_;
  std::chrono::milliseconds after_;
  std::mutex mutex_;  // guards published_, and held while the store is used
  std::optional<RankCall> published_;
  std::jthread thread_;  // last, because it uses the other members
};

}  // namespace normscope::binding
