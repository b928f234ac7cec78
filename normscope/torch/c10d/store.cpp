// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/c10d/store.h"

#include <algorithm>
#include <exception>
#include <future>
#include <memory>
#include <sstream>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "normscope/comm/call_observer.h"
#include "normscope/comm/communicator.h"
#include "normscope/comm/describe.h"
#include "normscope/core/error.h"

namespace normscope::binding {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

// How long a rank may take to answer after all others have found that a message has failed.
constexpr Milliseconds kPatience{2000};

// How long the server of a store may take to answer.
constexpr Milliseconds kStorePatience{5000};

// The pause before a server that took longer is asked again.
constexpr std::chrono::minutes kSilence{1};

// Pauses between two reads of the store.
constexpr Milliseconds kFirstPause{1};
constexpr Milliseconds kLongestPause{50};

constexpr const char* kFailure = "failure";
constexpr const char* kCall = "call";

std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

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
  call.age = std::chrono::nanoseconds(std::max<std::int64_t>(0, time_of_day() - begin));
  return call;
}

// Calls look() repeatedly until it returns true, or until the deadline.
template <class Look>
bool wait_until(Clock::time_point deadline, const Look& look) {
  for (Milliseconds pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    if (look()) return true;
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace

GroupStore::GroupStore(c10::intrusive_ptr<c10d::Store> store, int rank, std::vector<int> names)
    : store_(std::move(store)), rank_(static_cast<std::size_t>(rank)), names_(std::move(names)) {}

GroupStore GroupStore::part(const std::string& name, const std::vector<int>& members) const {
  std::vector<int> names;
  for (const int member : members) names.push_back(names_[static_cast<std::size_t>(member)]);
  GroupStore of_part(c10::make_intrusive<c10d::PrefixStore>(name, store_),
                     place_of(static_cast<int>(rank_), members), std::move(names));
  of_part.ask_again_ = ask_again_;
  return of_part;
}

// Returns ask(), or nullopt if it throws or takes too long, or if the server has not answered in
// the last minute. Without this limit a store would wait forever for a server that hangs.
template <class Ask>
auto GroupStore::answer_of(Milliseconds patience, Ask ask) const noexcept
    -> std::optional<decltype(ask())> {
  if (Clock::now().time_since_epoch().count() < ask_again_->load()) return std::nullopt;
  try {
    std::packaged_task task(std::move(ask));
    auto answer = task.get_future();
    std::thread(std::move(task)).detach();
    if (answer.wait_for(patience) == std::future_status::ready) return answer.get();
    ask_again_->store((Clock::now() + kSilence).time_since_epoch().count());
    return std::nullopt;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

std::string GroupStore::key(const std::string& what, std::size_t rank) const {
  return what + "/" + std::to_string(rank);
}

// The names of the ranks that have not set a key.
std::vector<int> GroupStore::without(const std::string& what) {
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < names_.size(); ++rank) {
    if (!store_->check({key(what, rank)})) ranks.push_back(names_[rank]);
  }
  return ranks;
}

void GroupStore::meet(const std::string& what, Milliseconds time_limit) {
  store_->set(key(what, rank_), bytes_of("1"));
  std::vector<std::string> all;
  for (std::size_t rank = 0; rank < names_.size(); ++rank) all.push_back(key(what, rank));
  std::optional<std::string> failed;
  const ObservedWait observed;
  const Clock::time_point begin = Clock::now();
  const bool are_there = wait_until(begin + time_limit, [&] {
    // Checked first, because the last rank to come may be too late.
    if (store_->check({kFailure})) failed = store_->get_to_str(kFailure);
    if (failed || store_->check(all)) return true;
    tell_observer(what, Clock::now() - begin);
    return false;
  });
  if (failed) throw CommunicationError(*failed);
  if (!are_there) {
    const auto seconds = std::chrono::duration<double>(time_limit).count();
    std::string text = list_of_ranks(without(what)) + " did not come within ";
    text += std::to_string(static_cast<std::int64_t>(seconds)) + " s";
    fail(text);
    throw TimeoutError(text);
  }
}

void GroupStore::tell_observer(const std::string& what, Clock::duration waited) {
  CallObserver* const observer = call_observer();
  if (observer == nullptr) return;
  try {
    observer->during_wait(waited, [&] {
      const std::vector<int> missing = without(what);
      return list_of_ranks(missing) + (missing.size() == 1 ? " is" : " are") +
             " not at the group's first meeting";
    });
  } catch (...) {
    fail(list_of_ranks({name()}) + " was interrupted while it waited");
    throw;
  }
}

void GroupStore::fail(const std::string& text) noexcept {
  (void)answer_of(kStorePatience, [store = store_, text] {
    if (!store->check({kFailure})) store->set(kFailure, bytes_of(text));
    return true;
  });
}

std::optional<std::string> GroupStore::failure() noexcept {
  const auto answer = answer_of(kStorePatience, [store = store_]() -> std::optional<std::string> {
    if (!store->check({kFailure})) return std::nullopt;
    return store->get_to_str(kFailure);
  });
  return answer ? *answer : std::nullopt;
}

void GroupStore::show_call(const RankCall& call) noexcept {
  (void)answer_of(kStorePatience, [store = store_, to = key(kCall, rank_), text = encode(call)] {
    store->set(to, bytes_of(text));
    return true;
  });
}

std::vector<std::pair<int, RankCall>> GroupStore::calls_of_others() noexcept {
  using Calls = std::vector<std::pair<int, RankCall>>;
  return answer_of(kStorePatience,
                   [store = *this] {
                     Calls calls;
                     for (std::size_t rank = 0; rank < store.names_.size(); ++rank) {
                       const std::string of_rank = store.key(kCall, rank);
                       if (rank == store.rank_ || !store.store_->check({of_rank})) continue;
                       calls.emplace_back(static_cast<int>(rank),
                                          decode(store.store_->get_to_str(of_rank)));
                     }
                     return calls;
                   })
      .value_or(Calls());
}

std::string GroupStore::who_is_missing() noexcept {
  constexpr const char* kStillHere = "still here";
  const auto missing = answer_of(kPatience + kStorePatience, [store = *this]() mutable {
    store.store_->set(store.key(kStillHere, store.rank_), bytes_of("1"));
    std::vector<int> ranks;
    wait_until(Clock::now() + kPatience, [&] {
      ranks = store.without(kStillHere);
      return ranks.empty();
    });
    return ranks;
  });
  if (!missing) {
    return "the group's store does not answer (its process, usually rank 0 or the launcher on rank "
           "0's host, has died or cannot be reached)";
  }
  if (missing->empty()) return "all ranks are there";
  return list_of_ranks(*missing) + (missing->size() == 1 ? " is" : " are") + " not there";
}

}  // namespace normscope::binding
