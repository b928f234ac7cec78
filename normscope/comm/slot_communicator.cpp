// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/slot_communicator.h"

#include <algorithm>
#include <cstdio>
#include <thread>
#include <vector>

#include <sched.h>

#include "normscope/comm/call_observer.h"
#include "normscope/comm/describe.h"
#include "normscope/comm/futex.h"
#include "normscope/comm/peer_process.h"
#include "normscope/core/error.h"

namespace normscope {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr std::size_t kReasonBytes = 1024;

// A peer on another core comes within a microsecond or two; a longer spin only keeps away the peers
// that wait for this core (8 ranks on 2 cores: half the time with 16 turns of that with 256). Who
// waits beyond the yields sleeps, and looks now and then whether the peer's process is alive.
constexpr int kSpins = 16;

// Ranks that touch fresh memory come some hundred microseconds apart, and a core that has gone to
// sleep takes long to wake in a virtual machine; but where ranks share cores, one that yields still
// takes turns from those that work.
microseconds yield_time(int ranks) {
  static const unsigned kCores = std::thread::hardware_concurrency();
  return static_cast<unsigned>(ranks) <= kCores ? microseconds{2000} : microseconds{200};
}

constexpr milliseconds kLongestSleep{100};

// A kilobyte is written within the first.
constexpr int kYieldsForAReason = 1000;

void pause_core() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

SlotCommunicator::SlotCommunicator(SlotMemory memory, int rank, std::string_view transport)
    : memory_(std::move(memory)),
      rank_(rank),
      size_(memory_.ranks()),
      yield_time_(yield_time(size_)),
      transport_(transport),
      options_(memory_.options()),
      epoch_(SlotMemory::kFirstEpoch),
      calls_(memory_.board(), rank, size_) {
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

SlotCommunicator::~SlotCommunicator() {
  if (!home_.is_this_one()) return;
  member(rank_).process = SlotMemory::kLeft;
  memory_.wake_sleepers(rank_);
}

std::string SlotCommunicator::describe(std::string_view text) const {
  return std::string(transport_) + ": " + std::string(text);
}

std::string SlotCommunicator::name_of(int rank) const { return name_of_rank(rank, size_); }

void SlotCommunicator::all_reduce_sum(std::span<double> values, Stream stream) {
  check_host_memory(*this, stream);
  throw_if_forked();
  throw_if_failed();
  std::size_t begin = 0;
  do {
    const auto piece = values.subspan(
        begin, std::min(values.size() - begin, static_cast<std::size_t>(options_.slot_length)));
    ++epoch_;
    member(rank_).lengths[epoch_ % 2] = static_cast<std::int64_t>(values.size());
    std::copy(piece.begin(), piece.end(), slot(rank_));
    announce();
    wait_for_all();
    throw_if_lengths_differ();
    add_slots(piece);
    begin += piece.size();
  } while (begin < values.size());
}

void SlotCommunicator::fail(std::string_view reason) noexcept {
  if (!home_.is_this_one()) return;
  char text[kReasonBytes];
  std::snprintf(text, sizeof(text), "rank %d of %d failed: %.*s", rank_, size_,
                static_cast<int>(std::min(reason.size(), sizeof(text))), reason.data());
  memory_.record_failure(text);
}

void SlotCommunicator::announce() noexcept {
  SlotMemory::Member& self = member(rank_);
  self.epoch = epoch_;
  if (self.sleepers != 0) memory_.wake_sleepers(rank_);
}

void SlotCommunicator::wait_for_all() {
  const ObservedWait observed;
  for (int i = 0; i < kSpins; ++i) {
    if (all_have_come()) return;
    pause_core();
  }
  const Clock::time_point start = Clock::now();
  while (Clock::now() - start < yield_time_) {
    if (all_have_come()) return;
    sched_yield();
  }
  for (int peer = 0; peer < size_; ++peer) {
    while (!has_come(peer)) {
      throw_if_failed();
      throw_if_any_gone();
      tell_observer(start);
      sleep_until_come(peer, time_left_or_throw(start));
    }
  }
}

// Or until kLongestSleep: there are others to look at.
void SlotCommunicator::sleep_until_come(int peer, milliseconds time_left) {
  SlotMemory::Member& awaited = member(peer);
  const std::uint32_t bell = awaited.bell;
  ++awaited.sleepers;
  if (!has_come(peer) && !memory_.has_failed() && awaited.process != SlotMemory::kLeft) {
    futex_wait(awaited.bell, bell, std::min(kLongestSleep, time_left));
  }
  --awaited.sleepers;
}

void SlotCommunicator::tell_observer(Clock::time_point start) {
  CallObserver* const observer = call_observer();
  if (observer == nullptr) return;
  try {
    observer->during_wait(Clock::now() - start, [this] { return where_ranks_are(); });
  } catch (...) {
    memory_.record_failure(name_of(rank_) + " was interrupted while it waited");
    throw;
  }
}

bool SlotCommunicator::has_come(int peer) const noexcept {
  // The sign of the difference survives the wrap-around. A peer is at most one epoch ahead.
  return static_cast<std::int32_t>(member(peer).epoch - epoch_) >= 0;
}

bool SlotCommunicator::all_have_come() const noexcept {
  for (int peer = 0; peer < size_; ++peer) {
    if (!has_come(peer)) return false;
  }
  return true;
}

void SlotCommunicator::throw_if_forked() const {
  if (home_.is_this_one()) return;
  throw CommunicationError(describe(home_.text_for_fork(name_of(rank_))));
}

void SlotCommunicator::throw_if_failed() const {
  if (memory_.has_failed()) throw CommunicationError(describe(memory_.failure()));
}

// Looks at all that have not come: a peer that is only late may hide one that will not come.
void SlotCommunicator::throw_if_any_gone() {
  std::vector<int> dead;
  std::vector<int> left;
  for (int peer = 0; peer < size_; ++peer) {
    if (has_come(peer)) continue;
    const std::int32_t process = member(peer).process;
    const bool has_left = process == SlotMemory::kLeft;
    const bool died = process > 0 && has_died(process, member(peer).pid_namespace);
    // It may have come in its last moment, so that the epoch is looked at after the process.
    if (!(has_left || died) || has_come(peer)) continue;
    (died ? dead : left).push_back(peer);
  }
  if (dead.empty() && left.empty()) return;
  // Who has left may have done so because another died.
  const std::string who =
      list_of_ranks(dead.empty() ? left : dead) + " of " + std::to_string(size_);
  const bool are_several = (dead.empty() ? left : dead).size() > 1;
  end_with<CommunicationError>(who + (are_several ? " have " : " has ") +
                               (dead.empty() ? "left the group" : "died"));
}

milliseconds SlotCommunicator::time_left_or_throw(Clock::time_point start) {
  const Clock::duration waited = Clock::now() - start;
  if (waited < options_.time_limit) {
    return std::chrono::ceil<milliseconds>(options_.time_limit - waited);
  }
  std::vector<int> missing;
  for (int peer = 0; peer < size_; ++peer) {
    if (!has_come(peer)) missing.push_back(peer);
  }
  if (missing.empty()) return milliseconds::zero();
  std::string text =
      name_of(rank_) + " waited " + in_seconds(waited) + " for " + list_of_ranks(missing);
  const std::string where = where_ranks_are();
  if (!where.empty()) text += ": " + where;
  end_with<TimeoutError>(text);
}

std::string SlotCommunicator::where_ranks_are() const {
  return who_is_where(calls_.read(), numbers_of_ranks(size_));
}

void SlotCommunicator::throw_if_lengths_differ() const {
  const auto length = [&](int rank) { return member(rank).lengths[epoch_ % 2]; };
  bool differ = false;
  for (int rank = 1; rank < size_; ++rank) differ = differ || length(rank) != length(0);
  if (!differ) return;
  std::string text = "all_reduce_sum: expected the same number of values from every rank, got ";
  for (int rank = 0; rank < size_; ++rank) {
    text += (rank == 0 ? "" : ", ") + std::to_string(length(rank)) + " from rank " +
            std::to_string(rank);
  }
  throw MismatchError(describe(text));
}

void SlotCommunicator::add_slots(std::span<double> sum) const noexcept {
  std::copy_n(slot(0), sum.size(), sum.data());
  for (int rank = 1; rank < size_; ++rank) {
    const double* __restrict summand = slot(rank);
    double* __restrict total = sum.data();
    for (std::size_t i = 0; i < sum.size(); ++i) total[i] += summand[i];
  }
}

// A peer that failed, and left, between two looks of this rank has told the reason: this rank only
// sees what followed.
template <class Error>
void SlotCommunicator::end_with(const std::string& text) {
  if (!memory_.record_failure(text)) {
    // A peer may have died while it wrote, so that this is not waited for without an end.
    for (int i = 0; i < kYieldsForAReason && !memory_.has_failed(); ++i) sched_yield();
    throw_if_failed();
  }
  throw Error(describe(text));
}

}  // namespace normscope
