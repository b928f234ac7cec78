// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/c10d/patient_store.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace normscope::binding {

// The pause before a server that was late is asked again.
constexpr std::chrono::minutes kSilence{1};

struct Helper::Tasks {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> waiting;
  bool are_complete = false;

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return are_complete || !waiting.empty(); });
      if (waiting.empty()) return;
      {
        const std::function<void()> task = std::move(waiting.front());
        waiting.pop_front();
        lock.unlock();
        task();
      }
      lock.lock();
    }
  }
};

Helper::Helper() noexcept {
  try {
    const auto tasks = std::make_shared<Tasks>();
    std::thread([tasks] { tasks->run(); }).detach();
    tasks_ = tasks;
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // No thread, or no memory for one.
  }
}

Helper::~Helper() {
  if (!tasks_) return;
  const std::lock_guard lock(tasks_->mutex);
  tasks_->are_complete = true;
  tasks_->changed.notify_all();
}

void Helper::post(std::function<void()> task) const {
  if (!tasks_) {
    task();
    return;
  }
  const std::lock_guard lock(tasks_->mutex);
  tasks_->waiting.push_back(std::move(task));
  tasks_->changed.notify_all();
}

PatientStore PatientStore::under(const std::string& prefix) const {
  return {prefix_.empty() ? prefix : prefix_ + "/" + prefix, server_};
}

PatientStore::Store PatientStore::Server::keys_under(const std::string& prefix) {
  std::call_once(is_connected, [this] {
    try {
      own = programs->clone();
    } catch (const std::exception&) {  // a store of the program's, or no connection
      own = programs;
    }
  });
  if (prefix.empty()) return own;
  return c10::make_intrusive<c10d::PrefixStore>(prefix, own);
}

bool PatientStore::is_silent() const noexcept {
  return Clock::now().time_since_epoch().count() < server_->ask_again.load();
}

void PatientStore::note_silence() const noexcept {
  server_->ask_again.store((Clock::now() + kSilence).time_since_epoch().count());
}

}  // namespace normscope::binding
