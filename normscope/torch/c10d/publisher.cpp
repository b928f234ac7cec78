// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/c10d/publisher.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace normscope::binding {
namespace {

using std::chrono::milliseconds;

// Time between two checks of the latest call's age; each check may ask the store about every rank.
constexpr milliseconds kPause{1000};
constexpr milliseconds kPauseOfRank{20};

}  // namespace

CallPublisher::CallPublisher(std::shared_ptr<OwnGroup> group, CallBoard board, milliseconds after)
    : group_(std::move(group)),
      board_(std::move(board)),
      after_(after),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

CallPublisher::~CallPublisher() = default;

void CallPublisher::publish() noexcept {
  const std::lock_guard lock(mutex_);
  published_ = board_.read_own();
  group_->show_call(*published_);
  const auto calls = group_->calls_of_others();
  for (const auto& [rank, call] : calls) board_.show(rank, call);
}

bool CallPublisher::is_published(const RankCall& call) {
  const std::lock_guard lock(mutex_);
  return published_ && published_->number == call.number && published_->state == call.state;
}

void CallPublisher::run(const std::stop_token& stop) {
  const auto ranks = board_.ranks();
  const milliseconds pause = std::min(kPause + ranks * kPauseOfRank, after_ / 4 + milliseconds(1));
  std::mutex of_wait;
  for (;;) {
    {
      std::unique_lock lock(of_wait);
      wake_.wait_for(lock, stop, pause, [] { return false; });
    }
    if (stop.stop_requested()) return;
    const RankCall call = board_.read_own();
    const bool is_old = call.state != CallState::kNone && call.age >= after_;
    // Repeated while the call waits, because the others may publish later.
    if (is_old && (call.state == CallState::kWaits || !is_published(call))) publish();
  }
}

}  // namespace normscope::binding
