// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/slot_group.h"

#include <algorithm>
#include <cstdio>
#include <thread>
#include <vector>

#include <sched.h>

#include "normscope/comm/call_observer.h"
#include "normscope/comm/describe.h"
#include "normscope/comm/futex.h"
#include "normscope/core/error.h"

namespace normscope {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr std::size_t kReasonBytes = 1024;

// A peer on another core arrives within a microsecond or two. A longer spin only blocks peers that
// wait for this core (8 ranks on 2 cores: 16 spins take half the time of 256). After spinning, a
// rank yields; then it sleeps, and checks from time to time whether the peer's process is alive.
constexpr int kSpins = 16;

// Long, because ranks that touch new memory arrive some hundred microseconds apart, and because an
// idle core takes long to wake up in a virtual machine. Shorter if ranks share cores: a rank that
// yields still takes time from those that work.
microseconds yield_time(int ranks) {
  static const unsigned kCores = std::thread::hardware_concurrency();
  return static_cast<unsigned>(ranks) <= kCores ? microseconds{2000} : microseconds{200};
}

constexpr milliseconds kLongestSleep{100};

// Time for a leader that has reached its own limit to report the reason to its followers.
constexpr milliseconds kGrace{1000};

// More than a peer needs to write a reason, of at most kReasonBytes.
constexpr int kYieldsForAReason = 1000;

void pause_core() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

SlotGroup::SlotGroup(SlotMemory memory, int rank, std::string_view transport, RankNames names)
    : memory_(std::move(memory)),
      rank_(rank),
      size_(memory_.ranks()),
      yield_time_(yield_time(size_)),
      transport_(transport),
      names_(std::move(names)),
      options_(memory_.options()),
      epoch_(SlotMemory::kFirstEpoch),
      calls_{.board = {memory_.board(), rank, size_}, .ranks = names_.numbers()} {
  if (rank < 0 || rank >= size_) {
    throw ArgumentError("rank: expected 0 to " + std::to_string(size_ - 1) + ", got " +
                        std::to_string(rank));
  }
  std::int32_t not_joined = SlotMemory::kNotJoined;
  if (!member(rank).process.compare_exchange_strong(not_joined, home_.id())) {
    throw ArgumentError("rank: expected one that has not joined yet, got " + std::to_string(rank));
  }
  member(rank).pid_namespace = own_pid_namespace();
}

SlotGroup::~SlotGroup() {
  if (!home_.is_this_one()) return;
  member(rank_).process = SlotMemory::kLeft;
  memory_.wake_sleepers(rank_);
}

std::string SlotGroup::describe(std::string_view text) const {
  return std::string(transport_) + ": " + std::string(text);
}

void SlotGroup::throw_if_forked() const {
  if (!home_.is_this_one()) throw CommunicationError(describe(home_.text_for_fork(name())));
}

void SlotGroup::begin_epoch(std::size_t length) noexcept {
  ++epoch_;
  this->length(rank_) = static_cast<std::int64_t>(length);
}

void SlotGroup::fail(std::string_view reason) noexcept {
  if (!home_.is_this_one()) return;
  char text[kReasonBytes];
  std::snprintf(text, sizeof(text), "rank %d of %d failed: %.*s", names_.number(rank_),
                names_.size(), static_cast<int>(std::min(reason.size(), sizeof(text))),
                reason.data());
  memory_.record_failure(text);
}

void SlotGroup::record_failure(std::string_view text) noexcept {
  if (home_.is_this_one()) memory_.record_failure(text);
}

std::string SlotGroup::failure() const { return memory_.has_failed() ? memory_.failure() : ""; }

void SlotGroup::announce() noexcept {
  SlotMemory::Member& self = member(rank_);
  self.epoch = epoch_;
  if (self.sleepers != 0) memory_.wake_sleepers(rank_);
}

void SlotGroup::wait_for(RankRange awaited) {
  const ObservedWait observed;
  for (int i = 0; i < kSpins; ++i) {
    if (have_come(awaited)) return;
    pause_core();
  }
  const Clock::time_point start = Clock::now();
  while (Clock::now() - start < yield_time_) {
    if (have_come(awaited)) return;
    sched_yield();
  }
  for (int peer = awaited.first; peer < awaited.last; ++peer) {
    while (!has_come(peer)) {
      throw_if_failed();
      throw_if_any_gone(awaited);
      tell_observer(start);
      sleep_until_come(peer, time_left_or_throw(awaited, start));
    }
  }
}

// Sleeps for at most kLongestSleep: other peers must be checked too.
void SlotGroup::sleep_until_come(int peer, milliseconds time_left) {
  SlotMemory::Member& awaited = member(peer);
  const std::uint32_t bell = awaited.bell;
  ++awaited.sleepers;
  if (!has_come(peer) && !memory_.has_failed() && awaited.process != SlotMemory::kLeft) {
    futex_wait(awaited.bell, bell, std::min(kLongestSleep, time_left));
  }
  --awaited.sleepers;
}

void SlotGroup::tell_observer(Clock::time_point start) {
  CallObserver* const observer = call_observer();
  if (observer == nullptr) return;
  try {
    observer->during_wait(Clock::now() - start, [this] { return where_ranks_are(); });
  } catch (...) {
    memory_.record_failure(name() + " was interrupted while it waited");
    throw;
  }
}

bool SlotGroup::has_come(int peer) const noexcept {
  // The sign survives the wrap-around of epochs: a peer is at most one epoch ahead.
  return static_cast<std::int32_t>(member(peer).epoch - epoch_) >= 0;
}

bool SlotGroup::have_come(RankRange peers) const noexcept {
  for (int peer = peers.first; peer < peers.last; ++peer) {
    if (!has_come(peer)) return false;
  }
  return true;
}

void SlotGroup::throw_if_failed() const {
  if (memory_.has_failed()) throw CommunicationError(describe(memory_.failure()));
}

// Checks all missing peers: the one that this rank waits for may only be late, and another dead.
void SlotGroup::throw_if_any_gone(RankRange awaited) {
  std::vector<int> dead;
  std::vector<int> left;
  for (int peer = awaited.first; peer < awaited.last; ++peer) {
    if (has_come(peer)) continue;
    const std::int32_t process = member(peer).process;
    const bool has_left = process == SlotMemory::kLeft;
    const bool died = process > 0 && has_died(process, member(peer).pid_namespace);
    // The peer may have announced the epoch just before it ended: check the epoch last.
    if (!(has_left || died) || has_come(peer)) continue;
    (died ? dead : left).push_back(peer);
  }
  if (dead.empty() && left.empty()) return;
  // A rank that has left may have done so because another died: name the dead only.
  const std::vector<int>& gone = dead.empty() ? left : dead;
  end_with<CommunicationError>(names_.names(gone) + (gone.size() > 1 ? " have " : " has ") +
                               (dead.empty() ? "left the group" : "died"));
}

milliseconds SlotGroup::time_left_or_throw(RankRange awaited, Clock::time_point start) {
  const Clock::duration waited = Clock::now() - start;
  if (waited < options_.time_limit) {
    return std::chrono::ceil<milliseconds>(options_.time_limit - waited);
  }
  if (have_come(awaited)) return milliseconds::zero();
  const std::vector<int> missing = this->missing();
  std::string text = name() + " waited " + in_seconds(waited) + " for ";
  if (missing.empty()) {
    // Only the leader is awaited, and it waits for other leaders with a limit of its own. Give it
    // time to report what it waits for.
    const Clock::duration limit = 2 * options_.time_limit + kGrace;
    if (waited < limit) return std::chrono::ceil<milliseconds>(limit - waited);
    text += names_.name(awaited.first) + ", which waits for other hosts";
  } else {
    text += names_.list(missing);
  }
  const std::string where = where_ranks_are();
  if (!where.empty()) text += ": " + where;
  end_with<TimeoutError>(text);
}

// Ranks that have neither arrived in this epoch nor announced it.
std::vector<int> SlotGroup::missing() const {
  std::vector<int> missing;
  for (int peer = 0; peer < size_; ++peer) {
    if (!has_come(peer) && member(peer).arrived != epoch_ && peer != rank_) missing.push_back(peer);
  }
  return missing;
}

std::string SlotGroup::where_ranks_are() const {
  const std::vector<RankCall> calls = calls_.board.read();
  return calls_.are_all ? who_is_where(calls, calls_.ranks)
                        : who_is_where_if_known(calls, calls_.ranks);
}

bool SlotGroup::lengths_differ() const noexcept {
  bool differ = false;
  for (int rank = 1; rank < size_; ++rank) differ = differ || length(rank) != length(0);
  return differ;
}

void SlotGroup::add_slots(std::span<double> sum) const noexcept {
  std::copy_n(slot(0), sum.size(), sum.data());
  for (int rank = 1; rank < size_; ++rank) {
    const double* __restrict summand = slot(rank);
    double* __restrict total = sum.data();
    for (std::size_t i = 0; i < sum.size(); ++i) total[i] += summand[i];
  }
}

// A peer may have failed and left between two checks of this rank. Its reason is then thrown: this
// rank has only seen the consequence.
template <class Error>
void SlotGroup::end_with(const std::string& text) {
  if (!memory_.record_failure(text)) {
    // Bounded, because the peer may have died while it wrote the reason.
    for (int i = 0; i < kYieldsForAReason && !memory_.has_failed(); ++i) sched_yield();
    throw_if_failed();
  }
  throw Error(describe(text));
}

template void SlotGroup::end_with<CommunicationError>(const std::string& text);
template void SlotGroup::end_with<TimeoutError>(const std::string& text);

}  // namespace normscope
