// SPDX-License-Identifier: Apache-2.0
#include "tests/comm/on_device/device_communicator.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "normscope/comm/describe.h"
#include "normscope/core/cache_lines.h"
#include "normscope/core/error.h"
#include "normscope/core/peer_memory.h"
#include "tests/comm/borrowed_communicator.h"

namespace normscope::testing {
namespace {

// What the ranks share. The device can access it, like all memory that tests allocate.
class DeviceGroup {
 public:
  DeviceGroup(int ranks, std::chrono::milliseconds time_limit)
      : time_limit_(time_limit), failures_(static_cast<std::size_t>(ranks), PeerMemory::kNone) {
    shared_.ranks = ranks;
    shared_.capacity = kMostChannels;
    shared_.time_limit = std::chrono::nanoseconds(time_limit).count();
    for (int rank = 0; rank < ranks; ++rank) {
      memory_.emplace_back(static_cast<std::size_t>(shared_.size()));
      shared_.of_ranks[rank] = memory_.back().data();
    }
  }

  [[nodiscard]] PeerMemory of_rank(int rank) {
    PeerMemory peers = shared_;
    peers.rank = rank;
    peers.failure = &failures_[static_cast<std::size_t>(rank)];
    return peers;
  }

  void fail(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    if (!first_reason().empty()) return;
    wait_for_announcements();
    reason_ = "device: " + reason;
    for (std::uint64_t& failure : failures_) {
      std::atomic_ref(failure).store(PeerMemory::kEnded, std::memory_order_release);
    }
  }

  void throw_if_failed() {
    const std::lock_guard lock(mutex_);
    if (!first_reason().empty()) throw CommunicationError(first_reason());
  }

 private:
  // Waits until each rank that has announced a channel to some others has announced it to all:
  // those then find it, and not the failure.
  void wait_for_announcements() const {
    for (int from = 0; from < shared_.ranks; ++from) {
      for (std::int64_t c = 0; c < shared_.capacity; ++c) {
        while (!is_announced_to_all(from, c)) std::this_thread::yield();
      }
    }
  }
  [[nodiscard]] bool is_announced_to_all(int from, std::int64_t c) const {
    std::set<std::uint64_t> announced;
    for (int owner = 0; owner < shared_.ranks; ++owner) {
      if (owner == from) continue;  // a rank announces nothing to itself
      const std::atomic_ref word(shared_.words(owner)[from * shared_.capacity + c]);
      announced.insert(word.load(std::memory_order_acquire));
    }
    return announced.size() <= 1;
  }

  // The host's, or that of a kernel; empty: none. Later ones do not replace it.
  const std::string& first_reason() {
    for (std::uint64_t& of_rank : failures_) {
      const std::uint64_t failure = std::atomic_ref(of_rank).load(std::memory_order_acquire);
      if (failure == PeerMemory::kNone || failure == PeerMemory::kEnded || !reason_.empty())
        continue;
      reason_ = "device: waited " + in_seconds(time_limit_) + " for " +
                name_of_rank(static_cast<int>(failure - 1), shared_.ranks);
    }
    return reason_;
  }

  std::chrono::milliseconds time_limit_;
  std::vector<AlignedVector<double>> memory_;
  std::vector<std::uint64_t> failures_;  // of each rank
  PeerMemory shared_;
  std::mutex mutex_;
  std::string reason_;
};

class DeviceCommunicator final : public BorrowedCommunicator {
 public:
  DeviceCommunicator(Communicator& on_host, DeviceGroup& group)
      : BorrowedCommunicator(on_host), group_(group), memory_(group.of_rank(rank())) {}
  DeviceCommunicator(const DeviceCommunicator&) = delete;
  DeviceCommunicator& operator=(const DeviceCommunicator&) = delete;
  ~DeviceCommunicator() override { group_.fail(name() + " has left"); }

  [[nodiscard]] std::string_view transport() const noexcept override { return "device"; }

  // Of messages that kernels do not exchange: those without channels. The host can add them.
  void all_reduce_sum(std::span<double> values, Stream /*stream*/) override {
    BorrowedCommunicator::all_reduce_sum(values, {});
  }

  [[nodiscard]] const PeerMemory* peer_memory(std::int64_t channels, Stream /*stream*/) override {
    if (channels > kMostChannels) {
      throw ArgumentError("channels: expected at most " + std::to_string(kMostChannels) + ", got " +
                          std::to_string(channels));
    }
    group_.throw_if_failed();
    return &memory_;
  }

  void fail(std::string_view reason) noexcept override {
    group_.fail(name() + " failed: " + std::string(reason));
    BorrowedCommunicator::fail(reason);
  }

 private:
  [[nodiscard]] std::string name() const { return name_of_rank(rank(), size()); }

  DeviceGroup& group_;
  const PeerMemory memory_;
};

}  // namespace

void run_as_threads_on_device(int ranks, const ExchangeOptions& options,
                              const CommunicatorBody& body) {
  DeviceGroup group(ranks, options.time_limit);
  run_as_threads(ranks, options, [&](Communicator& on_host) {
    DeviceCommunicator communicator(on_host, group);
    body(communicator);
  });
}

}  // namespace normscope::testing
