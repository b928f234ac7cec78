// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/c10d/publisher.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <sstream>
#include <string>
#include <utility>

#include "normscope/torch/c10d/periodic_thread.h"

namespace normscope::binding {
namespace {

using std::chrono::milliseconds;

// Time between two checks of the latest call's age; each check may ask the store about every rank.
constexpr milliseconds kPause{1000};
constexpr milliseconds kPauseOfRank{20};

// The clocks of several hosts agree on nothing but the time of day.
std::int64_t time_of_day() {
  using std::chrono::nanoseconds;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<nanoseconds>(now).count();
}

// "state number begin name".
std::string encode(const RankCall& call) {
  return std::to_string(static_cast<int>(call.state)) + ' ' + std::to_string(call.number) + ' ' +
         std::to_string(time_of_day() - call.age.count()) + ' ' + call.name;
}

RankCall decode(const std::string& text) {
  std::istringstream stream(text);
  int state = 0;
  std::int64_t begin = 0;
  RankCall call;
  stream >> state >> call.number >> begin;
  stream.ignore();
  std::getline(stream, call.name);
  call.state = static_cast<CallState>(state);
  if (!stream) return {};  // not written by a rank
  const std::int64_t age = time_of_day() - std::max<std::int64_t>(0, begin);
  call.age = std::chrono::nanoseconds(std::max<std::int64_t>(0, age));
  return call;
}

}  // namespace

CallPublisher::CallPublisher(std::shared_ptr<OwnGroup> group, CallBoard board, milliseconds after)
    : group_(std::move(group)), board_(std::move(board)), after_(after) {
  const milliseconds pause =
      std::min(kPause + board_.ranks() * kPauseOfRank, after_ / 4 + milliseconds(1));
  thread_ = periodic_thread(pause, [this] {
    publish_old_call();
    return true;
  });
}

void CallPublisher::publish() noexcept {
  const std::lock_guard lock(mutex_);
  try {
    published_ = board_.read_own();
    group_->show(encode(*published_));
    const auto texts = group_->shown_by_others();
    for (const auto& [rank, text] : texts) board_.show(rank, decode(text));
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // No memory for the texts: errors then do not say where the ranks are.
  }
}

bool CallPublisher::is_published(const RankCall& call) {
  const std::lock_guard lock(mutex_);
  return published_ && published_->number == call.number && published_->state == call.state;
}

void CallPublisher::publish_old_call() {
  const RankCall call = board_.read_own();
  const bool is_old = call.state != CallState::kNone && call.age >= after_;
  // Repeated while the call waits, because the others may publish later.
  if (is_old && (call.state == CallState::kWaits || !is_published(call))) publish();
}

}  // namespace normscope::binding
