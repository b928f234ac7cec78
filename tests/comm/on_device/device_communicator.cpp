// SPDX-License-Identifier: Apache-2.0
#include "tests/comm/on_device/device_communicator.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "normscope/comm/describe.h"
#include "normscope/core/cache_lines.h"
#include "normscope/core/error.h"
#include "normscope/kernels/peer_memory.h"
#include "tests/comm/borrowed_communicator.h"
#include "tests/kernels/kernels_under_test.h"

namespace normscope::testing {
namespace {

// What the ranks share. The device can access it, like all memory that tests allocate.
class DeviceGroup {
 public:
  DeviceGroup(int ranks, std::chrono::milliseconds time_limit) : time_limit_(time_limit) {
    shared_.ranks = ranks;
    shared_.capacity = kMostNumbers;
    shared_.time_limit = std::chrono::nanoseconds(time_limit).count();
    shared_.failure = failure_.get();
    for (int rank = 0; rank < ranks; ++rank) {
      memory_.emplace_back(static_cast<std::size_t>(shared_.size()));
      shared_.of_ranks[rank] = memory_.back().data();
    }
  }

  [[nodiscard]] PeerMemory of_rank(int rank) const {
    PeerMemory peers = shared_;
    peers.rank = rank;
    return peers;
  }

  void fail(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    if (!first_reason().empty()) return;
    wait_for_announcements();
    reason_ = "device: " + reason;
    std::atomic_ref(*failure_).store(PeerMemory::kByHost, std::memory_order_release);
  }

  void throw_if_failed() {
    const std::lock_guard lock(mutex_);
    if (!first_reason().empty()) throw CommunicationError(first_reason());
  }

 private:
  // Waits until each rank that has announced a part to some ranks has announced it to all: those
  // then find it, and not the failure.
  void wait_for_announcements() const {
    const auto word = [&](int owner, int i) {
      return std::atomic_ref(shared_.words(owner)[i]).load(std::memory_order_acquire);
    };
    for (int i = 0; i < shared_.ranks * PeerMemory::kParts; ++i) {
      for (int owner = 1; owner < shared_.ranks; ++owner) {
        while (word(owner, i) != word(0, i)) std::this_thread::yield();
      }
    }
  }

  // The host's, or that of a kernel; empty: none. Later ones do not replace it.
  const std::string& first_reason() {
    const std::uint64_t failure = std::atomic_ref(*failure_).load(std::memory_order_acquire);
    if (failure != PeerMemory::kNone && reason_.empty()) {
      reason_ = "device: waited " + in_seconds(time_limit_) + " for " +
                name_of_rank(static_cast<int>(failure - 1), shared_.ranks);
    }
    return reason_;
  }

  std::chrono::milliseconds time_limit_;
  std::vector<AlignedVector<double>> memory_;
  std::unique_ptr<std::uint64_t> failure_ = std::make_unique<std::uint64_t>(PeerMemory::kNone);
  PeerMemory shared_;
  std::mutex mutex_;
  std::string reason_;
};

class DeviceCommunicator final : public BorrowedCommunicator {
 public:
  DeviceCommunicator(Communicator& on_host, DeviceGroup& group)
      : BorrowedCommunicator(on_host), group_(group) {}
  DeviceCommunicator(const DeviceCommunicator&) = delete;
  DeviceCommunicator& operator=(const DeviceCommunicator&) = delete;
  ~DeviceCommunicator() override { group_.fail(name() + " has left"); }

  [[nodiscard]] std::string_view transport() const noexcept override { return "device"; }

  void all_reduce_sum(std::span<double> values, Stream stream) override {
    if (stream.memory == Memory::kHost) {
      BorrowedCommunicator::all_reduce_sum(values, stream);
      return;
    }
    if (std::ssize(values) > kMostNumbers) {
      throw ArgumentError("values: expected at most " + std::to_string(kMostNumbers) +
                          " numbers, got " + std::to_string(values.size()));
    }
    group_.throw_if_failed();
    device_kernels_under_test().peers.sum(stream, group_.of_rank(rank()), values.data(),
                                          std::ssize(values));
  }

  void fail(std::string_view reason) noexcept override {
    group_.fail(name() + " failed: " + std::string(reason));
    BorrowedCommunicator::fail(reason);
  }

 private:
  [[nodiscard]] std::string name() const { return name_of_rank(rank(), size()); }

  DeviceGroup& group_;
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
