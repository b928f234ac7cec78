// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/shared_memory_communicator.h"

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "normscope/comm/slot_communicator.h"
#include "normscope/comm/sub_group.h"
#include "normscope/core/error.h"

namespace normscope {
namespace {

class SharedMemoryCommunicator final : public SlotCommunicator {
 public:
  SharedMemoryCommunicator(const SharedMemorySegment& segment, int rank)
      : SlotCommunicator(SlotMemory(segment.memory()), rank, "shared memory") {}

  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override {
    const SubGroup sub_group = agree_on_sub_group(*this, color, key);
    const bool leads = sub_group.leader() == rank();
    std::optional<SharedMemorySegment> segment;
    std::string error;
    if (leads) segment = try_to(error, [&] { return create(sub_group); });
    const SharedMemoryAddress address = address_from(sub_group.leader(), segment);
    if (!leads && address.nonce != 0) {
      segment = try_to(error, [&] { return SharedMemorySegment::open(address); });
    }
    // This exchange also keeps the leader's segment open until all members have opened it.
    throw_if_any_failed(sub_group, error);
    auto part = std::make_unique<SharedMemoryCommunicator>(*segment, sub_group.rank);
    part->show_calls_as_part_of(*this, sub_group.members);
    return part;
  }

 private:
  // If `make` fails, returns nothing and sets `error`: the others must be told before this throws.
  template <class Make>
  [[nodiscard]] static std::optional<SharedMemorySegment> try_to(std::string& error,
                                                                 const Make& make) {
    try {
      return make();
    } catch (const CommunicationError& failure) {
      error = failure.what();
      return std::nullopt;
    }
  }

  [[nodiscard]] SharedMemorySegment create(const SubGroup& sub_group) const {
    return SharedMemorySegment::create(static_cast<int>(sub_group.members.size()),
                                       group().options());
  }

  // The address of the segment that `leader` has created; zeros if it has none. Collective: every
  // rank passes the segment that it has created, if any.
  [[nodiscard]] SharedMemoryAddress address_from(int leader,
                                                 const std::optional<SharedMemorySegment>& made) {
    const auto row = [](std::vector<double>& table, int of) {
      return std::span(table).subspan(3 * static_cast<std::size_t>(of), 3);
    };
    std::vector<double> addresses(3 * static_cast<std::size_t>(size()));
    if (made) {
      const SharedMemoryAddress address = made->address();
      const auto own = row(addresses, rank());
      own[0] = static_cast<double>(address.process);
      own[1] = static_cast<double>(address.descriptor);
      own[2] = static_cast<double>(address.nonce);
    }
    all_reduce_sum(addresses);
    const auto found = row(addresses, leader);
    return {.process = static_cast<std::int64_t>(found[0]),
            .descriptor = static_cast<std::int64_t>(found[1]),
            .nonce = static_cast<std::int64_t>(found[2])};
  }

  // Collective. `error` is this rank's own failure, or empty.
  void throw_if_any_failed(const SubGroup& sub_group, const std::string& error) {
    std::vector<double> failures(static_cast<std::size_t>(size()));
    failures[static_cast<std::size_t>(rank())] = error.empty() ? 0.0 : 1.0;
    all_reduce_sum(failures);
    if (!error.empty()) throw CommunicationError(error);
    for (const int member : sub_group.members) {
      if (failures[static_cast<std::size_t>(member)] == 0.0) continue;
      throw CommunicationError(group().describe(
          "split: " + group().names().name(member) + " could not " +
          (member == sub_group.leader() ? "create" : "open") + " the memory of the new group"));
    }
  }
};

}  // namespace

std::unique_ptr<Communicator> make_shared_memory_communicator(const SharedMemorySegment& segment,
                                                              int rank, const CallBoard* board) {
  auto communicator = std::make_unique<SharedMemoryCommunicator>(segment, rank);
  if (board != nullptr) communicator->show_calls_on(*board, /*shows_all=*/false);
  return communicator;
}

}  // namespace normscope
