// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace normscope::binding {

// Runs call() in a thread of its own, or here if the process cannot start another. The thread may
// outlive the caller: call holds what it needs by value. It is freed before the result is there,
// since the program may then end what the call refers to.
template <class Call>
auto run_apart(Call call) -> std::future<std::invoke_result_t<Call>> {
  using Result = std::invoke_result_t<Call>;
  const auto task = std::make_shared<std::packaged_task<Result()>>(
      [call = std::make_unique<Call>(std::move(call))]() mutable {
        const std::unique_ptr<Call> ends_with_this_scope = std::move(call);
        return (*ends_with_this_scope)();
      });
  std::future<Result> result = task->get_future();
  try {
    std::thread([task] { (*task)(); }).detach();
  } catch (const std::system_error&) {
    (*task)();
  }
  return result;
}

// A store of torch, which may be asked without waiting forever for a server that hangs or has died.
class PatientStore {
 public:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;
  using Store = c10::intrusive_ptr<c10d::Store>;

  explicit PatientStore(Store store) : server_(std::make_shared<Server>(std::move(store))) {}

  // The keys that begin with `prefix`, of the same server.
  [[nodiscard]] PatientStore under(const std::string& prefix) const;

  // Begins to ask: question(store). Its exceptions are those of the store.
  template <class Question>
  auto begin(Question question) const {
    return run_apart([server = server_, prefix = prefix_, question = std::move(question)] {
      const std::lock_guard lock(server->one_at_a_time);
      return question(*server->keys_under(prefix));
    });
  }

  // Returns the answer, or nullopt if the store throws, or if it does not answer in time or was
  // late within the last minute.
  template <class Question>
  auto ask(Milliseconds patience, Question question) const noexcept
      -> std::optional<std::invoke_result_t<Question, c10d::Store&>> {
    if (is_silent()) return std::nullopt;
    try {
      auto answer = begin(std::move(question));
      if (answer.wait_for(patience) == std::future_status::ready) return answer.get();
      note_silence();
      return std::nullopt;
    } catch (const std::exception&) {
      return std::nullopt;
    }
  }

 private:
  struct Server {
    explicit Server(Store store) : programs(std::move(store)) {}

    // The keys that begin with `prefix`, by a connection of normscope's own: while torch waits for
    // a key, other calls of the same connection wait too.
    Store keys_under(const std::string& prefix);

    // When to ask again, as a count of the clock.
    std::atomic<Clock::rep> ask_again = 0;
    const Store programs;
    std::mutex one_at_a_time;  // held while it is asked; guards the next one
    Store own;
  };

  PatientStore(std::string prefix, std::shared_ptr<Server> server)
      : prefix_(std::move(prefix)), server_(std::move(server)) {}

  [[nodiscard]] bool is_silent() const noexcept;
  void note_silence() const noexcept;

  std::string prefix_;
  std::shared_ptr<Server> server_;
};

}  // namespace normscope::binding
