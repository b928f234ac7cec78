// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/thread_communicator.h"

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <utility>

#include "normscope/comm/slot_communicator.h"
#include "normscope/core/cache_lines.h"
#include "normscope/core/error.h"

namespace normscope {
namespace {

constexpr std::align_val_t kAlignment{kCacheLine};

// The data that the threads of a group share.
struct ThreadGroup {
  ThreadGroup(int size, const ExchangeOptions& options)
      : bytes(SlotMemory::bytes(size, options)),
        memory(::operator new(static_cast<std::size_t>(bytes), kAlignment),
               [](void* address) { ::operator delete(address, kAlignment); }),
        parts(static_cast<std::size_t>(size)) {
    SlotMemory::initialize(memory.get(), size, options);
  }

  std::int64_t bytes;
  std::shared_ptr<void> memory;
  std::vector<std::shared_ptr<ThreadGroup>> parts;  // during a split: by leader, else null
};

class ThreadCommunicator final : public SlotCommunicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadGroup> group, int rank)
      : SlotCommunicator(SlotMemory(group->memory, group->bytes), rank, "threads"),
        group_(std::move(group)) {}

  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override {
    const std::vector<int> members = members_of_part(*this, color, key);
    const int leader = members.front();
    if (leader == rank()) part_led_by(leader) = make_part(static_cast<int>(members.size()));
    wait_for_peers();
    const std::shared_ptr<ThreadGroup> part = part_led_by(leader);
    wait_for_peers();
    if (leader == rank()) part_led_by(leader) = nullptr;
    if (part == nullptr) {
      throw CommunicationError(
          describe("split: " + name_of(leader) + " could not create the memory of the new group"));
    }
    auto communicator = std::make_unique<ThreadCommunicator>(part, place_of(rank(), members));
    communicator->show_calls_as_part_of(*this, members);
    return communicator;
  }

 private:
  // Null if there is no memory: the leader must notify the others before it throws.
  [[nodiscard]] std::shared_ptr<ThreadGroup> make_part(int ranks) const {
    try {
      return std::make_shared<ThreadGroup>(ranks, options());
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
  }

  [[nodiscard]] std::shared_ptr<ThreadGroup>& part_led_by(int leader) const {
    return group_->parts[static_cast<std::size_t>(leader)];
  }

  void wait_for_peers() { all_reduce_sum({}); }

  std::shared_ptr<ThreadGroup> group_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(
    int size, const ExchangeOptions& options) {
  const auto group = std::make_shared<ThreadGroup>(size, options);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(std::make_unique<ThreadCommunicator>(group, rank));
  }
  return ranks;
}

}  // namespace normscope
