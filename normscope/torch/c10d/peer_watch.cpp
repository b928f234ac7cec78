// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/c10d/peer_watch.h"

#include <chrono>
#include <new>
#include <utility>

namespace normscope::binding {
namespace {

// Between two looks.
constexpr std::chrono::milliseconds kBetweenLooks{500};

}  // namespace

PeerWatch::PeerWatch(std::function<std::optional<std::string>()> look,
                     std::function<void(const std::string&)> on_failure,
                     std::function<void()> end_work)
    : look_(std::move(look)),
      on_failure_(std::move(on_failure)),
      end_work_(std::move(end_work)),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

void PeerWatch::run(const std::stop_token& stop) {
  for (bool is_noted = false; !is_noted;) {
    if (!pause(stop)) return;
    try {
      if (const auto reason = look_()) {
        on_failure_(*reason);
        is_noted = true;
      }
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch)
      // No memory for the text: the next look tries again.
    }
  }
  if (pause(stop)) end_work_();
}

// Returns whether to go on.
bool PeerWatch::pause(const std::stop_token& stop) {
  std::unique_lock lock(of_pause_);
  wake_.wait_for(lock, stop, kBetweenLooks, [] { return false; });
  return !stop.stop_requested();
}

}  // namespace normscope::binding
