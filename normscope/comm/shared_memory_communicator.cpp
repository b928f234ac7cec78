// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/shared_memory_communicator.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "normscope/comm/slot_communicator.h"
#include "normscope/core/error.h"

namespace normscope {
namespace {

class SharedMemoryCommunicator final : public SlotCommunicator {
 public:
  SharedMemoryCommunicator(const SharedMemorySegment& segment, int rank)
      : SlotCommunicator(SlotMemory(segment.memory(), segment.bytes()), rank, "shared memory") {}

  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override {
    const std::vector<int> members = members_of_part(*this, color, key);
    const MemoryOfPart memory = make_memory_of_part(*this, members, options());
    if (!memory.error.empty()) throw CommunicationError(memory.error);
    for (const int member : members) {
      if (std::ranges::count(memory.without, member) == 0) continue;
      throw CommunicationError(describe("split: " + name_of(member) + " could not " +
                                        (member == members.front() ? "create" : "open") +
                                        " the memory of the new group"));
    }
    auto part =
        std::make_unique<SharedMemoryCommunicator>(*memory.segment, place_of(rank(), members));
    part->show_calls_as_part_of(*this, members);
    // The part would not notice the death of a rank that has not joined it. Some do not come here
    // if a rank has no memory of its part, which all ranks know.
    if (memory.without.empty()) all_reduce_sum({});
    return part;
  }
};

}  // namespace

std::unique_ptr<Communicator> make_shared_memory_communicator(const SharedMemorySegment& segment,
                                                              int rank, const CallBoard* board) {
  auto communicator = std::make_unique<SharedMemoryCommunicator>(segment, rank);
  if (board != nullptr) communicator->show_calls_on(*board, /*shows_all=*/false);
  return communicator;
}

MemoryOfPart make_memory_of_part(Communicator& whole, const std::vector<int>& members,
                                 const ExchangeOptions& options) {
  MemoryOfPart made;
  // The others must be notified of an error before it is thrown.
  const auto try_to = [&](const auto& make) {
    try {
      made.segment = make();
    } catch (const Error& error) {
      made.error = error.what();
    }
  };
  const bool leads = members.front() == whole.rank();
  if (leads) {
    try_to([&] { return SharedMemorySegment::create(static_cast<int>(members.size()), options); });
  }
  const SharedMemoryAddress own = made.segment ? made.segment->address() : SharedMemoryAddress{};
  const std::vector<double> rows =
      gather(whole, {static_cast<double>(own.process), static_cast<double>(own.descriptor),
                     static_cast<double>(own.nonce)});
  const auto row = std::span(rows).subspan(3 * static_cast<std::size_t>(members.front()), 3);
  const SharedMemoryAddress address{.process = static_cast<std::int64_t>(row[0]),
                                    .descriptor = static_cast<std::int64_t>(row[1]),
                                    .nonce = static_cast<std::int64_t>(row[2])};
  if (!leads && address.nonce != 0) try_to([&] { return SharedMemorySegment::open(address); });
  // This sum also keeps the leader's segment open until all members have opened it.
  const std::vector<double> errors = gather(whole, {made.error.empty() ? 0.0 : 1.0});
  for (int rank = 0; rank < whole.size(); ++rank) {
    if (errors[static_cast<std::size_t>(rank)] != 0.0) made.without.push_back(rank);
  }
  return made;
}

}  // namespace normscope
