// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/slot_memory.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>
#include <new>
#include <utility>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "normscope/comm/calls.h"
#include "normscope/comm/processes.h"
#include "normscope/core/error.h"
#include "normscope/core/text.h"

namespace normscope {
namespace {

// Two slots of 8-byte numbers for each rank are then far below the limit of an int64.
constexpr int kMaxRanks = 1 << 16;
constexpr std::int64_t kMaxSlotLength = std::int64_t{1} << 30;

// Group::failure.
enum Failure : std::uint32_t { kNone, kBeingWritten, kWritten };

std::size_t slot_bytes(std::int64_t slot_length) {
  return whole_cache_lines(static_cast<std::size_t>(slot_length) * sizeof(double));
}

[[noreturn]] void throw_size(std::int64_t expected, std::int64_t bytes) {
  throw CommunicationError("a group's memory: expected " + std::to_string(expected) +
                           " bytes, got " + std::to_string(bytes));
}

std::int64_t bytes_in_header(int ranks, const ExchangeOptions& options) {
  try {
    return SlotMemory::bytes(ranks, options);
  } catch (const ArgumentError& error) {
    throw CommunicationError(std::string("a group's memory: ") + error.what());
  }
}

}  // namespace

struct SlotMemory::Group {
  std::atomic<std::int32_t> ranks;
  std::atomic<std::int64_t> slot_length;
  std::atomic<std::chrono::milliseconds> time_limit;
  alignas(kCacheLine) std::atomic<std::uint32_t> failure = kNone;
  char reason[kReasonBytes] = {};  // valid if failure == kWritten
};

std::int64_t SlotMemory::bytes(int ranks, const ExchangeOptions& options) {
  if (ranks < 1 || ranks > kMaxRanks) {
    throw ArgumentError("ranks: expected 1 to " + std::to_string(kMaxRanks) + ", got " +
                        std::to_string(ranks));
  }
  if (options.slot_length < 1 || options.slot_length > kMaxSlotLength) {
    throw ArgumentError("slot_length: expected 1 to " + std::to_string(kMaxSlotLength) + ", got " +
                        std::to_string(options.slot_length));
  }
  if (options.time_limit <= std::chrono::milliseconds::zero()) {
    throw ArgumentError("time_limit: expected more than 0 ms, got " +
                        std::to_string(options.time_limit.count()) + " ms");
  }
  const std::size_t per_rank = sizeof(Member) + 2 * slot_bytes(options.slot_length);
  return static_cast<std::int64_t>(whole_cache_lines(sizeof(Group)) +
                                   CallBoard::memory_bytes(ranks) +
                                   static_cast<std::size_t>(ranks) * per_rank);
}

void SlotMemory::initialize(void* memory, int ranks, const ExchangeOptions& options) {
  new (memory) Group{.ranks = ranks,
                     .slot_length = options.slot_length,
                     .time_limit = std::min(options.time_limit, kLongestTimeLimit)};
  std::byte* board = static_cast<std::byte*>(memory) + whole_cache_lines(sizeof(Group));
  CallBoard::initialize(board, ranks);
  std::byte* members = board + CallBoard::memory_bytes(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    new (members + static_cast<std::size_t>(rank) * sizeof(Member)) Member;
  }
}

SlotMemory::SlotMemory(std::shared_ptr<void> memory, std::int64_t bytes)
    : memory_(std::move(memory)) {
  if (bytes < std::int64_t{sizeof(Group)}) throw_size(sizeof(Group), bytes);
  ranks_ = group().ranks;
  options_ = {.time_limit = group().time_limit, .slot_length = group().slot_length};
  const std::int64_t expected = bytes_in_header(ranks_, options_);
  if (bytes != expected) throw_size(expected, bytes);
  std::byte* const members =
      static_cast<std::byte*>(board().get()) + CallBoard::memory_bytes(ranks_);
  members_ = reinterpret_cast<Member*>(members);
  slots_ = reinterpret_cast<std::byte*>(members_ + ranks_);
  slot_bytes_ = slot_bytes(options_.slot_length);
}

GroupStatus SlotMemory::look_at() const {
  GroupStatus status{.calls = CallBoard(board(), 0, ranks()).read(),
                     .processes = {},
                     .dead = {},
                     .failure = has_failed() ? failure() : ""};
  for (int rank = 0; rank < ranks(); ++rank) {
    const std::int32_t process = member(rank).process;
    status.processes.push_back(process);
    if (process > 0 && has_died(process, member(rank).pid_namespace)) status.dead.push_back(rank);
  }
  return status;
}

SlotMemory::Group& SlotMemory::group() const noexcept {
  return *static_cast<Group*>(memory_.get());
}

std::shared_ptr<void> SlotMemory::board() const noexcept {
  return {memory_, static_cast<std::byte*>(memory_.get()) + whole_cache_lines(sizeof(Group))};
}

bool SlotMemory::has_failed() const noexcept { return group().failure == kWritten; }

std::string SlotMemory::failure() const {
  return as_utf8({group().reason, strnlen(group().reason, kReasonBytes)});
}

bool SlotMemory::record_failure(std::string_view reason) const noexcept {
  std::uint32_t none = kNone;
  if (!group().failure.compare_exchange_strong(none, kBeingWritten)) return false;
  const std::string_view text = shortened(reason, kReasonBytes - 1);
  group().reason[text.copy(group().reason, text.size())] = '\0';
  group().failure = kWritten;
  for (int rank = 0; rank < ranks(); ++rank) wake_sleepers(rank);
  return true;
}

// Not FUTEX_PRIVATE: the sleepers may be other processes.
void SlotMemory::sleep(int rank, std::uint32_t bell,
                       std::chrono::milliseconds limit) const noexcept {
  static_assert(
      sizeof(Member::bell) == sizeof(std::uint32_t) && decltype(Member::bell)::is_always_lock_free,
      "the kernel reads the atomic as a plain word");
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  const timespec timeout{.tv_sec = static_cast<std::time_t>(seconds.count()),
                         .tv_nsec = std::chrono::nanoseconds(limit - seconds).count()};
  syscall(SYS_futex, &member(rank).bell, FUTEX_WAIT, bell, &timeout, nullptr, 0);
}

void SlotMemory::wake_sleepers(int rank) const noexcept {
  ++member(rank).bell;
  syscall(SYS_futex, &member(rank).bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace normscope
