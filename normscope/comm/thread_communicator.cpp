// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/thread_communicator.h"

#include <cstddef>
#include <new>
#include <string>
#include <utility>

#include "normscope/comm/slot_communicator.h"
#include "normscope/comm/sub_group.h"
#include "normscope/core/cache_lines.h"
#include "normscope/core/error.h"

namespace normscope {
namespace {

constexpr std::align_val_t kAlignment{kCacheLine};

// The data that the threads of a group share.
struct ThreadGroup {
  ThreadGroup(int size, const ExchangeOptions& options)
      : memory(
            ::operator new(static_cast<std::size_t>(SlotMemory::bytes(size, options)), kAlignment),
            [](void* address) { ::operator delete(address, kAlignment); }),
        parts(static_cast<std::size_t>(size)) {
    SlotMemory::initialize(memory.get(), size, options);
  }

  std::shared_ptr<void> memory;
  std::vector<std::shared_ptr<ThreadGroup>> parts;  // during a split: by leader, else null
};

class ThreadCommunicator final : public SlotCommunicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadGroup> group, int rank)
      : SlotCommunicator(SlotMemory(group->memory), rank, "threads"), group_(std::move(group)) {}

  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override {
    const SubGroup sub_group = agree_on_sub_group(*this, color, key);
    if (sub_group.leader() == rank()) part_led_by(rank()) = make_part(sub_group);
    wait_for_peers();
    const std::shared_ptr<ThreadGroup> part = part_led_by(sub_group.leader());
    wait_for_peers();
    if (sub_group.leader() == rank()) part_led_by(rank()) = nullptr;
    if (part == nullptr) {
      throw CommunicationError(
          group().describe("split: " + group().names().name(sub_group.leader()) +
                           " could not create the memory of the new group"));
    }
    auto communicator = std::make_unique<ThreadCommunicator>(part, sub_group.rank);
    communicator->show_calls_as_part_of(*this, sub_group.members);
    return communicator;
  }

 private:
  // Null if there is no memory: the leader must tell the others before it throws.
  [[nodiscard]] std::shared_ptr<ThreadGroup> make_part(const SubGroup& sub_group) const {
    try {
      return std::make_shared<ThreadGroup>(static_cast<int>(sub_group.members.size()),
                                           group().options());
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
