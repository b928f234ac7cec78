// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/slot_communicator.h"

#include <algorithm>
#include <cstdio>
#include <thread>
#include <vector>

#include <sched.h>

#include "normscope/comm/call_observer.h"
#include "normscope/comm/describe.h"
#include "normscope/comm/message_length.h"
#include "normscope/core/error.h"
#include "normscope/core/text.h"

namespace normscope {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

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

// More than a peer needs to write a reason.
constexpr int kYieldsForAReason = 1000;

void pause_core() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

SlotCommunicator::SlotCommunicator(SlotMemory memory, int place, std::string transport,
                                   std::vector<int> numbers, int size)
    : memory_(std::move(memory)),
      place_(place),
      transport_(std::move(transport)),
      numbers_(std::move(numbers)),
      size_(size),
      yield_time_(yield_time(memory_.ranks())),
      board_(memory_.board(), place, memory_.ranks()) {
  if (place < 0 || place >= memory_.ranks()) {
    throw ArgumentError("rank: expected 0 to " + std::to_string(memory_.ranks() - 1) + ", got " +
                        std::to_string(place));
  }
  std::int32_t not_joined = SlotMemory::kNotJoined;
  if (!member(place).process.compare_exchange_strong(not_joined, home_.id())) {
    throw ArgumentError("rank: expected one that has not joined yet, got " + std::to_string(place));
  }
  member(place).pid_namespace = own_pid_namespace();
}

void SlotCommunicator::leave() noexcept {
  if (!is_at_home()) return;
  member(place_).process = SlotMemory::kLeft;
  memory_.wake_sleepers(place_);
}

void SlotCommunicator::all_reduce_sum(std::span<double> values, Stream stream) {
  check_host_memory(*this, stream);
  throw_if_unusable();
  if (sum(values)) return;
  throw MismatchError(describe(text_of_different_lengths(different_lengths(values.size()))));
}

bool SlotCommunicator::sum(std::span<double> values) {
  const auto longest = static_cast<std::size_t>(options().slot_length);
  std::size_t begin = 0;
  do {
    const auto piece = values.subspan(begin, std::min(values.size() - begin, longest));
    ++epoch_;
    length(place_) = static_cast<std::int64_t>(values.size());
    std::ranges::copy(piece, slot(place_));
    if (!sum_piece(piece, values.size())) return false;
    begin += piece.size();
  } while (begin < values.size());
  return true;
}

bool SlotCommunicator::sum_piece(std::span<double> piece, std::size_t /*length*/) {
  announce();
  wait_for(all());
  if (lengths_differ()) return false;
  add_slots(piece);
  return true;
}

std::vector<double> SlotCommunicator::different_lengths(std::size_t /*own*/) {
  std::vector<double> lengths;
  for (int place = 0; place < memory_.ranks(); ++place) {
    lengths.push_back(static_cast<double>(length(place)));
  }
  return lengths;
}

std::string SlotCommunicator::describe(std::string_view text) const {
  return transport_ + ": " + std::string(text);
}

std::string SlotCommunicator::list(std::vector<int> places) const {
  for (int& place : places) place = number(place);
  return list_of_ranks(places);
}

void SlotCommunicator::throw_if_unusable() const {
  if (!is_at_home()) throw CommunicationError(describe(home_.text_for_fork(name())));
  throw_if_failed();
}

void SlotCommunicator::fail(std::string_view reason) noexcept {
  if (!is_at_home()) return;
  char prefix[64];
  std::snprintf(prefix, sizeof(prefix), "rank %d of %d failed: ", rank(), size_);
  FixedText<kReasonBytes> text;
  text.put(prefix);
  text.put(reason);
  memory_.record_failure(text.view());
}

void SlotCommunicator::record_failure(std::string_view text) noexcept {
  if (is_at_home()) memory_.record_failure(text);
}

std::string SlotCommunicator::failure() const {
  return memory_.has_failed() ? memory_.failure() : "";
}

void SlotCommunicator::announce() noexcept {
  SlotMemory::Member& self = member(place_);
  self.epoch = epoch_;
  if (self.sleepers != 0) memory_.wake_sleepers(place_);
}

void SlotCommunicator::wait_for(Places awaited) {
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
      notify_observer(
          Clock::now() - start, [this] { return where_ranks_are(); },
          [this] { memory_.record_failure(name() + " was interrupted while it waited"); });
      sleep_until_come(peer, time_left_or_throw(awaited, start));
    }
  }
}

// Sleeps for at most kLongestSleep: other peers must be checked too.
void SlotCommunicator::sleep_until_come(int peer, milliseconds time_left) {
  SlotMemory::Member& awaited = member(peer);
  const std::uint32_t bell = awaited.bell;
  ++awaited.sleepers;
  if (!has_come(peer) && !memory_.has_failed() && awaited.process != SlotMemory::kLeft) {
    memory_.sleep(peer, bell, std::min(kLongestSleep, time_left));
  }
  --awaited.sleepers;
}

bool SlotCommunicator::has_come(int peer) const noexcept {
  // The sign survives the wrap-around of epochs: a peer is at most one epoch ahead.
  return static_cast<std::int32_t>(member(peer).epoch - epoch_) >= 0;
}

bool SlotCommunicator::have_come(Places peers) const noexcept {
  for (int peer = peers.first; peer < peers.last; ++peer) {
    if (!has_come(peer)) return false;
  }
  return true;
}

void SlotCommunicator::throw_if_failed() const {
  if (memory_.has_failed()) throw CommunicationError(describe(memory_.failure()));
}

// Checks all missing peers: the one that this rank waits for may only be late, and another dead.
void SlotCommunicator::throw_if_any_gone(Places awaited) {
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
  end_with<CommunicationError>(list(gone) + " of " + std::to_string(size_) +
                               (gone.size() > 1 ? " have " : " has ") +
                               (dead.empty() ? "left the group" : "died"));
}

milliseconds SlotCommunicator::time_left_or_throw(Places awaited, Clock::time_point start) {
  const Clock::duration waited = Clock::now() - start;
  if (waited < options().time_limit) {
    return std::chrono::ceil<milliseconds>(options().time_limit - waited);
  }
  if (have_come(awaited)) return milliseconds::zero();
  const std::vector<int> missing = this->missing();
  std::string text = name() + " waited " + in_seconds(waited) + " for ";
  if (missing.empty()) {
    // Only the leader is awaited, and it waits for other leaders with a limit of its own. Give it
    // time to report what it waits for.
    const Clock::duration limit = 2 * options().time_limit + kGrace;
    if (waited < limit) return std::chrono::ceil<milliseconds>(limit - waited);
    text += name_of(awaited.first) + ", which waits for other hosts";
  } else {
    text += list(missing);
  }
  const std::string where = where_ranks_are();
  if (!where.empty()) text += ": " + where;
  end_with<TimeoutError>(text);
}

// Ranks that have neither arrived in this epoch nor announced it.
std::vector<int> SlotCommunicator::missing() const {
  std::vector<int> missing;
  for (int peer = 0; peer < memory_.ranks(); ++peer) {
    if (!has_come(peer) && member(peer).arrived != epoch_ && peer != place_)
      missing.push_back(peer);
  }
  return missing;
}

std::string SlotCommunicator::where_ranks_are() const {
  const std::vector<RankCall> calls = board_.read();
  const std::vector<int> ranks = board_.ranks() == size_ ? numbers_of_ranks(size_) : numbers_;
  return shows_all_ ? who_is_where(calls, ranks) : who_is_where_if_known(calls, ranks);
}

bool SlotCommunicator::lengths_differ() const noexcept {
  bool differ = false;
  for (int place = 1; place < memory_.ranks(); ++place) {
    differ = differ || length(place) != length(0);
  }
  return differ;
}

void SlotCommunicator::add_slots(std::span<double> sum) const noexcept {
  std::copy_n(slot(0), sum.size(), sum.data());
  for (int place = 1; place < memory_.ranks(); ++place) {
    const double* __restrict summand = slot(place);
    double* __restrict total = sum.data();
    for (std::size_t i = 0; i < sum.size(); ++i) total[i] += summand[i];
  }
}

// A peer may have failed and left between two checks of this rank. Its reason is then thrown: this
// rank has only seen the consequence.
template <class Error>
void SlotCommunicator::end_with(const std::string& text) {
  if (!memory_.record_failure(text)) {
    // Bounded, because the peer may have died while it wrote the reason.
    for (int i = 0; i < kYieldsForAReason && !memory_.has_failed(); ++i) sched_yield();
    throw_if_failed();
  }
  throw Error(describe(text));
}

template void SlotCommunicator::end_with<CommunicationError>(const std::string& text);
template void SlotCommunicator::end_with<TimeoutError>(const std::string& text);

}  // namespace normscope
