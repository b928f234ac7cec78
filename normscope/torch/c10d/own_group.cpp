// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/c10d/own_group.h"

#include <algorithm>
#include <exception>
#include <future>
#include <iterator>
#include <new>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "normscope/comm/call_observer.h"
#include "normscope/comm/communicator.h"
#include "normscope/comm/describe.h"
#include "normscope/comm/processes.h"
#include "normscope/core/error.h"
#include "normscope/core/text.h"
#include "normscope/torch/errors.h"
#include "normscope/torch/tensors/op.h"

namespace normscope::binding {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;
using c10d::Store;

// How long a rank may take to answer after all others have found that a message has failed. A rank
// of this host whose process lives is only late, and gets this time. If the only rank that has not
// answered is on another host, it gets kGrace: the ranks that had to wait for a message answer
// before the others can notice that it has failed.
constexpr Milliseconds kPatience{2000};
constexpr Milliseconds kGrace{200};

// How long rank 0 stays for others to read the reason: those that wait for a message look for it
// every half a second. If it is rank 0 that fails, they have lost their connection.
constexpr Milliseconds kTimeToRead{1000};
constexpr Milliseconds kTimeToReadOfFailure{100};

// How long the server of a store may take to answer.
constexpr Milliseconds kStorePatience{5000};

// How long it has in any case, and how long a rank that waits goes without looking for signals.
constexpr Milliseconds kMoment{1000};
constexpr Milliseconds kLongestWait{100};

// Pauses between two reads of the store.
constexpr Milliseconds kFirstPause{1};
constexpr Milliseconds kLongestPause{50};

constexpr const char* kFailure = "failure";
constexpr const char* kCall = "call";
constexpr const char* kStillHere = "still here";
constexpr const char* kHasRead = "has read";

using Places = std::vector<std::size_t>;

// Ops that Python implements.
using MakeProcessGroupOp = std::string(std::string_view name, std::string_view parent,
                                       at::IntArrayRef ranks, double seconds, bool devices);
using CloseProcessGroupOp = void(std::string_view name);

std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

// Calls look() repeatedly until it returns true, or until the deadline.
template <class Look>
bool wait_until(Clock::time_point deadline, const Look& look) {
  for (Milliseconds pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    if (look()) return true;
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(pause);
  }
}

constexpr const char* kNoAnswer =
    "the group's store does not answer (its process, usually rank 0 or the launcher on rank 0's "
    "host, has died or cannot be reached)";

// Only the first text is kept.
void write_failure(const PatientStore& store, const std::string& text) {
  (void)store.ask(kStorePatience, [text](Store& asked) {
    if (!asked.check({kFailure})) asked.set(kFailure, bytes_of(text));
    return true;
  });
}

std::string key(const std::string& what, std::size_t rank) {
  return what + "/" + std::to_string(rank);
}

// The places, of `size`, without the key `what`.
Places places_without(Store& store, const std::string& what, std::size_t size) {
  Places without;
  for (std::size_t place = 0; place < size; ++place) {
    if (!store.check({key(what, place)})) without.push_back(place);
  }
  return without;
}

std::optional<std::string> reason_in(Store& store) {
  if (!store.check({kFailure})) return std::nullopt;
  return as_utf8(store.get_to_str(kFailure));
}

bool is_dead(std::int32_t process) {
  return process != 0 && has_died(process, own_pid_namespace());
}

Places dead_places(const std::vector<std::int32_t>& processes) {
  Places dead;
  for (std::size_t place = 0; place < processes.size(); ++place) {
    if (is_dead(processes[place])) dead.push_back(place);
  }
  return dead;
}

// A name that no other group has: a store may outlive a group, and then serve another group of the
// same name. All ranks have the same count, because each use of a group is collective.
auto new_name(int rank, const std::string& name, OwnGroup::Use use) {
  const std::string prefix =
      "normscope/" + name + (use == OwnGroup::Use::kHost ? "/host/" : "/device/");
  return [prefix, rank](Store& store) {
    return prefix + std::to_string(store.add(prefix + "of rank " + std::to_string(rank), 1));
  };
}

std::string text_of(int rank, std::string_view reason) {
  return "rank " + std::to_string(rank) + " failed: " + std::string(reason);
}

}  // namespace

struct OwnGroup::Wait {
  explicit Wait(Milliseconds limit) : deadline(begin + limit) {}

  ObservedWait observed;
  Clock::time_point begin = Clock::now();
  Clock::time_point deadline;
};

struct OwnGroup::RollCall {
  std::optional<std::string> reason;  // which another rank has found meanwhile
  Places dead;
  Places silent;  // those without an answer, dead or not
};

OwnGroup::OwnGroup(PatientStore store, std::string name, std::string parent, Use use, int rank,
                   std::vector<int> ranks, Milliseconds time_limit)
    : store_(std::move(store)),
      name_(std::move(name)),
      parent_(std::move(parent)),
      use_(use),
      rank_(static_cast<std::size_t>(rank)),
      ranks_(std::move(ranks)),
      processes_(ranks_.size(), 0),
      time_limit_(time_limit) {}

OwnGroup::OwnGroup(c10d::ProcessGroup& group, const std::string& name, Use use,
                   Milliseconds time_limit)
    : OwnGroup(PatientStore(group.getStore()), "", name, use, group.getRank(),
               numbers_of_ranks(group.getSize()), time_limit) {
  name_ = await(store_.begin(new_name(group.getRank(), name, use)), "the group's store",
                Wait(time_limit));
  store_ = store_.under(name_);
}

std::unique_ptr<OwnGroup> OwnGroup::part(const std::string& name,
                                         const std::vector<int>& members) const {
  std::vector<int> ranks;
  for (const int member : members) ranks.push_back(ranks_[static_cast<std::size_t>(member)]);
  auto part = std::make_unique<OwnGroup>(store_.under(name), name_ + "/" + name, parent_, use_,
                                         place_of(static_cast<int>(rank_), members),
                                         std::move(ranks), time_limit_);
  std::ranges::transform(members, part->processes_.begin(),
                         [&](int member) { return processes_[static_cast<std::size_t>(member)]; });
  return part;
}

void OwnGroup::know_processes(std::vector<std::int32_t> processes) {
  processes_ = std::move(processes);
  // They are alive, so an id that seems dead has another meaning here.
  for (std::int32_t& process : processes_) {
    if (is_dead(process)) process = 0;
  }
}

void OwnGroup::refuse(c10d::ProcessGroup& group, const std::string& name,
                      std::string_view reason) noexcept {
  try {
    const PatientStore store(group.getStore());
    const std::string text = text_of(group.getRank(), reason);
    for (const Use use : {Use::kHost, Use::kDevices}) {
      const auto name_of_group = store.ask(kStorePatience, new_name(group.getRank(), name, use));
      if (name_of_group) write_failure(store.under(*name_of_group), text);
    }
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // Peers then find out at their time limit.
  }
}

void OwnGroup::wait_and_make() {
  wait_for_ranks("begun");
  make();
}

void OwnGroup::make() {
  // By another thread: torch.distributed asks the store without a limit.
  const auto make = [name = name_, parent = parent_,
                     ranks = std::vector<std::int64_t>(ranks_.begin(), ranks_.end()),
                     seconds = std::chrono::duration<double>(time_limit_).count(),
                     devices = serves_devices()]() -> std::string {
    try {
      return op_named<MakeProcessGroupOp>("normscope::make_process_group")
          .call(name, parent, ranks, seconds, devices);
    } catch (const c10::Error& of_torch) {
      return of_torch.what_without_backtrace();
    }
  };
  std::string error = await(run_apart(make), "torch.distributed to make a group of the ranks",
                            Wait(time_limit_ + kStorePatience), [this] {
                              if (const auto reason = failure()) throw CommunicationError(*reason);
                            });
  try {
    if (error.empty()) group_ = c10d::resolve_process_group(name_);
  } catch (const c10::Error& of_torch) {
    error = of_torch.what_without_backtrace();
  }
  if (error.empty()) {
    // A rank may be connected before the others. It must not leave before they are connected.
    wait_for_ranks("made");
    return;
  }
  const std::string text =
      "torch.distributed made no group for normscope's messages alone, next to the group \"" +
      parent_ + "\": " + error;
  publish_failure(text);
  throw CommunicationError(text);
}

// By another thread: Python may be about to raise an exception in this one, and would lose it.
void OwnGroup::close() noexcept {
  const auto close = [name = name_] {
    try {
      op_named<CloseProcessGroupOp>("normscope::close_process_group").call(name);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
      // Peers then find out at their time limit. An error of Python holds the last reference to the
      // group and its store, if the program destroys all groups meanwhile: they end here, and not
      // after the program has gone on and removed the store's file, for which torch would end the
      // process.
    }
  };
  try {
    run_apart(close).wait_for(kStorePatience);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // No memory for the task: as above.
  }
}

void OwnGroup::fail(std::string_view reason) noexcept {
  publish_failure(reason);
  close();
  try {
    hand_out(kTimeToReadOfFailure, dead_places(processes_));
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch)
    // Peers then name this rank as missing, without the reason.
  }
}

void OwnGroup::abandon(std::string_view reason) noexcept {
  if (!reason.empty()) publish_failure(reason);
  static_cast<void>(new (std::nothrow) c10::intrusive_ptr<c10d::ProcessGroup>(group_.lock()));
  close();
}

void OwnGroup::publish_failure(std::string_view reason) noexcept {
  try {
    write_failure(store_, text_of(own_rank(), reason));
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch)
    // No memory for the text: peers then find out at their time limit.
  }
}

std::string OwnGroup::fail_after(const std::string& what,
                                 const std::function<std::string()>& who_is_where) {
  // In this order: closing the group ends the waits of the other ranks, which then look for the
  // ranks that are there.
  const bool has_answered = show_presence(true);
  close();
  return has_answered ? reason_of(what, who_is_where) : reason_of(std::nullopt, what, who_is_where);
}

bool OwnGroup::show_presence(bool is_present) {
  const auto show = [own = key(kStillHere, rank_), is_present](Store& store) {
    if (is_present) {
      store.set(own, bytes_of("1"));
    } else {
      store.deleteKey(own);
    }
    return true;
  };
  return store_.ask(kStorePatience, show).has_value();
}

std::string OwnGroup::reason_of(const std::string& what,
                                const std::function<std::string()>& who_is_where) {
  return reason_of(call_roll(), what, who_is_where);
}

std::string OwnGroup::reason_of(const std::optional<RollCall>& roll, const std::string& what,
                                const std::function<std::string()>& who_is_where) {
  if (roll && roll->reason) {
    hand_out(kTimeToRead, dead_places(processes_));
    return *roll->reason;
  }
  std::string text = describe(roll) + " (" + what + ")";
  if (const std::string where = who_is_where(); !where.empty()) text += ": " + where;
  if (!roll) return text;
  write_failure(store_, text);
  hand_out(kTimeToRead, roll->silent);
  return text;
}

// Waits for an answer of `whom`, which has a moment for it even at the end of the wait. Meanwhile
// calls look() repeatedly.
template <class Answer>
Answer OwnGroup::await(std::future<Answer> answer, const std::string& whom, const Wait& wait,
                       const std::function<void()>& look) {
  const Clock::time_point deadline = std::max(wait.deadline, Clock::now() + kMoment);
  for (;;) {
    const auto left = std::max(Clock::duration::zero(), deadline - Clock::now());
    const auto status = answer.wait_for(std::min<Clock::duration>(left, kLongestWait));
    if (status == std::future_status::ready) break;
    if (left == Clock::duration::zero()) {
      throw TimeoutError("waited " + in_seconds(Clock::now() - wait.begin) + " for " + whom + ": " +
                         kNoAnswer);
    }
    look();
    notify_observer(wait, [&] { return "this rank waits for " + whom; });
  }
  try {
    return answer.get();
  } catch (const std::exception& error) {
    throw CommunicationError(std::string(kNoAnswer) + ": " + std::string(what_of(error)));
  }
}

void OwnGroup::wait_for_ranks(const std::string& what) {
  const Wait wait(time_limit_);
  await(store_.begin([own = key(what, rank_)](Store& store) {
    store.set(own, bytes_of("1"));
    return true;
  }),
        "the group's store", wait);
  std::vector<std::string> keys;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) keys.push_back(key(what, rank));
  const auto look =
      [all = std::make_shared<const std::vector<std::string>>(std::move(keys))](Store& store) {
        // Checked first, because the last rank to come may be too late.
        std::optional<std::string> failure = reason_in(store);
        const bool are_there = !failure && store.check(*all);
        return std::pair(std::move(failure), are_there);
      };
  for (Milliseconds pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    const auto [failure, are_there] = await(store_.begin(look), "the group's store", wait);
    if (failure) throw CommunicationError(*failure);
    if (are_there) return;
    if (Clock::now() >= wait.deadline) break;
    notify_observer(wait, [&] {
      const std::optional<Places> missing = missing_at(what);
      if (!missing) return std::string(kNoAnswer);
      return list(*missing) + (missing->size() == 1 ? " is" : " are") +
             " not at the group's rendezvous";
    });
    std::this_thread::sleep_for(pause);
  }
  const std::optional<Places> missing = missing_at(what);
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time_limit_);
  const std::string text = (missing ? list(*missing) : "ranks") + " did not come within " +
                           std::to_string(seconds.count()) + " s";
  write_failure(store_, text);
  throw TimeoutError(text);
}

// The places of the ranks that have not come.
std::optional<std::vector<std::size_t>> OwnGroup::missing_at(const std::string& what) const {
  return store_.ask(kStorePatience, [what, size = ranks_.size()](Store& store) {
    return places_without(store, what, size);
  });
}

void OwnGroup::notify_observer(const Wait& wait, const std::function<std::string()>& who_is_where) {
  normscope::notify_observer(Clock::now() - wait.begin, who_is_where, [this] {
    // Without a name, the keys would be the program's own.
    if (name_.empty()) return;
    write_failure(store_, list_of_ranks({own_rank()}) + " was interrupted while it waited");
  });
}

std::optional<std::string> OwnGroup::failure() {
  const auto answer = store_.ask(kStorePatience, reason_in);
  return answer ? *answer : std::nullopt;
}

std::optional<std::string> OwnGroup::death() const {
  const Places dead = dead_places(processes_);
  return dead.empty() ? std::nullopt : std::optional(text_of_dead(dead));
}

void OwnGroup::show(std::string text) {
  (void)store_.ask(kStorePatience, [to = key(kCall, rank_), text = std::move(text)](Store& store) {
    store.set(to, bytes_of(text));
    return true;
  });
}

std::vector<std::pair<int, std::string>> OwnGroup::shown_by_others() {
  using Texts = std::vector<std::pair<int, std::string>>;
  const auto read = [own = rank_, size = ranks_.size()](Store& store) {
    Texts texts;
    for (std::size_t rank = 0; rank < size; ++rank) {
      if (rank == own || !store.check({key(kCall, rank)})) continue;
      texts.emplace_back(static_cast<int>(rank), store.get_to_str(key(kCall, rank)));
    }
    return texts;
  };
  return store_.ask(kStorePatience, read).value_or(Texts());
}

std::optional<OwnGroup::RollCall> OwnGroup::call_roll() {
  const auto look = [processes = processes_](Store& store) {
    RollCall roll;
    const Clock::time_point begin = Clock::now();
    wait_until(begin + kPatience, [&] {
      roll.reason = reason_in(store);
      roll.silent = places_without(store, kStillHere, processes.size());
      roll.dead.clear();
      std::ranges::copy_if(roll.silent, std::back_inserter(roll.dead),
                           [&](std::size_t place) { return is_dead(processes[place]); });
      if (roll.reason || !roll.dead.empty() || roll.silent.empty()) return true;
      const bool may_be_late = roll.silent.size() > 1 || processes[roll.silent.front()] != 0;
      return !may_be_late && Clock::now() - begin >= kGrace;
    });
    return roll;
  };
  return store_.ask(kPatience + kStorePatience, look);
}

std::string OwnGroup::describe(const std::optional<RollCall>& roll) const {
  Places dead;
  if (roll) {
    dead = roll->dead;
  } else {
    // A process loses its connections a moment before it has ended.
    wait_until(Clock::now() + kGrace, [&] {
      dead = dead_places(processes_);
      return !dead.empty();
    });
  }
  if (!dead.empty()) return text_of_dead(dead);
  if (!roll) return kNoAnswer;
  if (roll->silent.empty()) return "all ranks are there";
  return list(roll->silent) + (roll->silent.size() == 1 ? " is" : " are") + " not there";
}

void OwnGroup::hand_out(Milliseconds patience, const Places& missing) {
  const auto note = [own = rank_, size = ranks_.size(), missing, patience,
                     waits = own_rank() == 0](Store& store) {
    store.set(key(kHasRead, own), bytes_of("1"));
    for (const std::size_t place : missing) store.set(key(kHasRead, place), bytes_of("1"));
    if (!waits) return true;
    return wait_until(Clock::now() + patience,
                      [&] { return places_without(store, kHasRead, size).empty(); });
  };
  (void)store_.ask(patience + kStorePatience, note);
}

std::string OwnGroup::text_of_dead(const Places& places) const {
  return list(places) + (places.size() == 1 ? " has died" : " have died");
}

std::string OwnGroup::list(const Places& places) const {
  std::vector<int> ranks;
  for (const std::size_t place : places) ranks.push_back(ranks_[place]);
  return list_of_ranks(ranks);
}

}  // namespace normscope::binding
