// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/slot_communicator.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include <sched.h>

#include "normscope/comm/call_observer.h"
#include "normscope/comm/describe.h"
#include "normscope/comm/futex.h"
#include "normscope/comm/peer_process.h"
#include "normscope/core/cache_line.h"
#include "normscope/core/error.h"

namespace normscope {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr std::size_t kReasonBytes = 1024;

// Their product, times two slots of 8 bytes, is far from the end of an int64.
constexpr int kMaxRanks = 1 << 16;
constexpr std::int64_t kMaxSlotLength = std::int64_t{1} << 30;

// Epochs wrap around after 2^32 exchanges. They begin shortly before, so that every long run
// crosses the wrap-around and no defect there can hide.
constexpr std::uint32_t kFirstEpoch = 0U - 256U;

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

// Member::process, where it is not a process id.
constexpr std::int32_t kNotJoined = 0;
constexpr std::int32_t kLeft = -1;

// Group::failure.
enum Failure : std::uint32_t { kNone, kBeingWritten, kWritten };

std::size_t slot_bytes(std::int64_t slot_length) {
  return whole_cache_lines(static_cast<std::size_t>(slot_length) * sizeof(double));
}

void pause_core() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// All atomics are sequentially consistent. Announcing and falling asleep rely on it: either the
// sleeper sees the new epoch, or the announcer sees the sleeper.
struct SlotCommunicator::Group {
  int ranks;
  std::int64_t slot_length;
  milliseconds time_limit;
  alignas(kCacheLine) std::atomic<std::uint32_t> failure = kNone;
  char reason[kReasonBytes] = {};  // to be read where failure == kWritten
};

struct alignas(kCacheLine) SlotCommunicator::Member {
  std::atomic<std::uint32_t> epoch = kFirstEpoch;
  std::atomic<std::uint32_t> bell = 0;      // what those who wait for this rank sleep on
  std::atomic<std::uint32_t> sleepers = 0;  // how many they are
  std::atomic<std::int32_t> process = kNotJoined;
  std::atomic<std::uint64_t> pid_namespace = 0;  // whose number that is; 0 until it is known
  std::int64_t lengths[2] = {};                  // of the whole message, by the parity of the epoch
};

std::int64_t SlotCommunicator::memory_bytes(int ranks, const ExchangeOptions& options) {
  if (ranks < 1 || ranks > kMaxRanks) {
    throw ArgumentError("ranks: expected 1 to " + std::to_string(kMaxRanks) + ", got " +
                        std::to_string(ranks));
  }
  if (options.slot_length < 1 || options.slot_length > kMaxSlotLength) {
    throw ArgumentError("slot_length: expected 1 to " + std::to_string(kMaxSlotLength) + ", got " +
                        std::to_string(options.slot_length));
  }
  if (options.time_limit <= milliseconds::zero()) {
    throw ArgumentError("time_limit: expected more than 0 ms, got " +
                        std::to_string(options.time_limit.count()) + " ms");
  }
  const std::size_t per_rank = sizeof(Member) + 2 * slot_bytes(options.slot_length);
  return static_cast<std::int64_t>(whole_cache_lines(sizeof(Group)) +
                                   CallBoard::memory_bytes(ranks) +
                                   static_cast<std::size_t>(ranks) * per_rank);
}

void SlotCommunicator::initialize(void* memory, int ranks, const ExchangeOptions& options) {
  new (memory)
      Group{.ranks = ranks, .slot_length = options.slot_length, .time_limit = options.time_limit};
  std::byte* board = static_cast<std::byte*>(memory) + whole_cache_lines(sizeof(Group));
  CallBoard::initialize(board, ranks);
  std::byte* members = board + CallBoard::memory_bytes(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    new (members + static_cast<std::size_t>(rank) * sizeof(Member)) Member;
  }
}

GroupStatus SlotCommunicator::look_at(const std::shared_ptr<void>& memory) {
  const auto& group = *static_cast<const Group*>(memory.get());
  const auto* const members = reinterpret_cast<const Member*>(
      static_cast<const std::byte*>(board_in(memory).get()) + CallBoard::memory_bytes(group.ranks));
  GroupStatus status{.calls = CallBoard(board_in(memory), 0, group.ranks).read(),
                     .processes = {},
                     .failure = group.failure == kWritten ? group.reason : ""};
  for (int rank = 0; rank < group.ranks; ++rank) status.processes.push_back(members[rank].process);
  return status;
}

SlotCommunicator::SlotCommunicator(std::shared_ptr<void> memory, int rank,
                                   std::string_view transport)
    : memory_(std::move(memory)),
      rank_(rank),
      size_(group().ranks),
      yield_time_(yield_time(size_)),
      transport_(transport),
      slot_length_(group().slot_length),
      epoch_(kFirstEpoch),
      calls_(board_in(memory_), rank, size_) {
  if (rank < 0 || rank >= size_) {
    throw ArgumentError("rank: expected 0 to " + std::to_string(size_ - 1) + ", got " +
                        std::to_string(rank));
  }
  std::int32_t not_joined = kNotJoined;
  if (!member(rank).process.compare_exchange_strong(not_joined, home_.id())) {
    throw ArgumentError("rank: expected one that has not joined yet, got " + std::to_string(rank));
  }
  member(rank).pid_namespace = own_pid_namespace();
}

SlotCommunicator::~SlotCommunicator() {
  if (!home_.is_this_one()) return;
  member(rank_).process = kLeft;
  wake_sleepers(rank_);
}

ExchangeOptions SlotCommunicator::options() const noexcept {
  return {.time_limit = group().time_limit, .slot_length = slot_length_};
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
        begin, std::min(values.size() - begin, static_cast<std::size_t>(slot_length_)));
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
  record_failure(text);
}

SlotCommunicator::Group& SlotCommunicator::group() const noexcept {
  return *static_cast<Group*>(memory_.get());
}

std::shared_ptr<void> SlotCommunicator::board_in(const std::shared_ptr<void>& memory) noexcept {
  return {memory, static_cast<std::byte*>(memory.get()) + whole_cache_lines(sizeof(Group))};
}

SlotCommunicator::Member& SlotCommunicator::member(int rank) const noexcept {
  std::byte* board = static_cast<std::byte*>(memory_.get()) + whole_cache_lines(sizeof(Group));
  return reinterpret_cast<Member*>(board + CallBoard::memory_bytes(size_))[rank];
}

// The slot of the current epoch.
double* SlotCommunicator::slot(int rank) const noexcept {
  std::byte* slots = reinterpret_cast<std::byte*>(&member(size_));
  const std::size_t index = 2 * static_cast<std::size_t>(rank) + epoch_ % 2;
  return reinterpret_cast<double*>(slots + index * slot_bytes(slot_length_));
}

void SlotCommunicator::announce() noexcept {
  Member& self = member(rank_);
  self.epoch = epoch_;
  if (self.sleepers != 0) wake_sleepers(rank_);
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
  Member& awaited = member(peer);
  const std::uint32_t bell = awaited.bell;
  ++awaited.sleepers;
  if (!has_come(peer) && group().failure != kWritten && awaited.process != kLeft) {
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
    record_failure(name_of(rank_) + " was interrupted while it waited");
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
  if (group().failure == kWritten) throw CommunicationError(describe(group().reason));
}

// Looks at all that have not come: a peer that is only late may hide one that will not come.
void SlotCommunicator::throw_if_any_gone() {
  std::vector<int> dead;
  std::vector<int> left;
  for (int peer = 0; peer < size_; ++peer) {
    if (has_come(peer)) continue;
    const std::int32_t process = member(peer).process;
    const bool has_left = process == kLeft;
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
  if (waited < group().time_limit) {
    return std::chrono::ceil<milliseconds>(group().time_limit - waited);
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
  if (!record_failure(text)) {
    // A peer may have died while it wrote, so that this is not waited for without an end.
    for (int i = 0; i < kYieldsForAReason && group().failure != kWritten; ++i) sched_yield();
    throw_if_failed();
  }
  throw Error(describe(text));
}

// Whether this failure is the first of the group, which wins.
bool SlotCommunicator::record_failure(std::string_view text) noexcept {
  std::uint32_t none = kNone;
  if (!group().failure.compare_exchange_strong(none, kBeingWritten)) return false;
  const std::size_t bytes = std::min(text.size(), kReasonBytes - 1);
  std::memcpy(group().reason, text.data(), bytes);
  group().reason[bytes] = '\0';
  group().failure = kWritten;
  for (int peer = 0; peer < size_; ++peer) wake_sleepers(peer);
  return true;
}

void SlotCommunicator::wake_sleepers(int peer) noexcept {
  ++member(peer).bell;
  futex_wake_all(member(peer).bell);
}

}  // namespace normscope
