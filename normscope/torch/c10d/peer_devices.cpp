// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/c10d/peer_devices.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "normscope/comm/describe.h"
#include "normscope/comm/processes.h"
#include "normscope/core/error.h"

namespace normscope::binding {
namespace {

// More are rare, and every group would have to allocate memory for them.
constexpr std::int64_t kMostChannels = 4096;

bool all_give(Communicator& ranks, double own, double expected) {
  return std::ranges::count(gather(ranks, {own}), expected) == ranks.size();
}

// Whether call() succeeds on all ranks.
template <class Call>
bool all_can(Communicator& ranks, const Call& call) {
  double success = 1.0;
  try {
    call();
  } catch (const DeviceError&) {
    success = 0.0;
  }
  return all_give(ranks, success, 1.0);
}

std::vector<PeerHandle> gather_handles(Communicator& ranks, const PeerHandle& own) {
  std::vector<double> bytes;
  for (const std::byte byte : own) bytes.push_back(std::to_integer<int>(byte));
  const std::vector<double> all = gather(ranks, bytes);
  std::vector<PeerHandle> handles(static_cast<std::size_t>(ranks.size()));
  for (std::size_t i = 0; i < all.size(); ++i) {
    handles[i / own.size()][i % own.size()] = static_cast<std::byte>(all[i]);
  }
  return handles;
}

}  // namespace

std::unique_ptr<PeerDevices> PeerDevices::make(Communicator& ranks, const DeviceKernels& kernels,
                                               c10::DeviceType type,
                                               std::chrono::milliseconds time_limit) {
  const auto host = static_cast<double>(identity_of_process_ids());
  if (ranks.size() > PeerMemory::kMostRanks || !all_give(ranks, host, host)) return nullptr;
  const c10::Device device = c10::impl::VirtualGuardImpl(type).getDevice();
  std::unique_ptr<PeerDevices> made(new PeerDevices(ranks, kernels, device, time_limit));
  PeerMemory& memory = made->memory_;
  PeerHandle handle = {};
  const auto allocate = [&] {
    memory.failure = kernels.peers.allocate_word();
    memory.of_ranks[memory.rank] = kernels.peers.allocate(memory.size(), handle);
  };
  if (!all_can(ranks, allocate)) return nullptr;
  const std::vector<PeerHandle> handles = gather_handles(ranks, handle);
  const auto open = [&] {
    for (int rank = 0; rank < memory.ranks; ++rank) {
      if (rank == memory.rank) continue;
      memory.of_ranks[rank] = kernels.peers.open(handles[static_cast<std::size_t>(rank)]);
    }
  };
  return all_can(ranks, open) ? std::move(made) : nullptr;
}

PeerDevices::PeerDevices(const Communicator& ranks, const DeviceKernels& kernels,
                         c10::Device device, std::chrono::milliseconds time_limit)
    : kernels_(kernels), device_(device), time_limit_(time_limit) {
  memory_.rank = ranks.rank();
  memory_.ranks = ranks.size();
  memory_.capacity = kMostChannels;
  memory_.time_limit = std::chrono::nanoseconds(time_limit).count();
}

bool PeerDevices::exchange(std::int64_t channels, c10::Device device) const {
  return device == device_ && channels <= memory_.capacity;
}

const PeerMemory& PeerDevices::memory_for_next(Stream stream) {
  const std::uint64_t failure = std::atomic_ref(*memory_.failure).load(std::memory_order_acquire);
  if (failure != PeerMemory::kNone && failure != PeerMemory::kEnded) {
    const std::string text = "an exchange timed out: waited " + in_seconds(time_limit_) + " for ";
    throw TimeoutError(text + name_of_rank(static_cast<int>(failure - 1), memory_.ranks));
  }
  // The program orders a graph with other work.
  if (!kernels_.is_capturing(stream)) {
    if (last_ && last_->handle != stream.handle) kernels_.peers.order(*last_, stream);
    last_ = stream;
  }
  return memory_;
}

void PeerDevices::end_waits() noexcept {
  if (memory_.failure == nullptr) return;
  std::uint64_t none = PeerMemory::kNone;
  std::atomic_ref(*memory_.failure)
      .compare_exchange_strong(none, PeerMemory::kEnded, std::memory_order_release);
}

}  // namespace normscope::binding
