// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/shared_memory_between.h"

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <utility>

#include "normscope/comm/shared_memory_communicator.h"
#include "normscope/comm/shared_memory_segment.h"
#include "normscope/core/error.h"

namespace normscope {
namespace {

bool is_wanted() {
  const char* chosen = std::getenv("NORMSCOPE_SHARED_MEMORY");
  return chosen == nullptr || std::string_view(chosen) != "0";
}

std::unique_ptr<Communicator> join(const SharedMemoryAddress& address, int rank) {
  try {
    return make_shared_memory_communicator(SharedMemorySegment::open(address), rank);
  } catch (const Error&) {
    return nullptr;  // another host, or a process that may not look into rank 0's
  }
}

}  // namespace

std::unique_ptr<Communicator> shared_memory_between(Communicator& group,
                                                    std::chrono::milliseconds time_limit) {
  const bool wanted = is_wanted();
  std::optional<SharedMemorySegment> segment;
  SharedMemoryAddress address;
  if (wanted && group.rank() == 0) {
    try {
      segment = SharedMemorySegment::create(group.size(), {.time_limit = time_limit});
      address = segment->address();
    } catch (const Error&) {
      // No memory or descriptor is left: the address stays zero, and nobody joins.
    }
  }

  double gathered[] = {static_cast<double>(address.process),
                       static_cast<double>(address.descriptor), static_cast<double>(address.nonce)};
  group.all_reduce_sum(gathered);
  address = {static_cast<std::int64_t>(gathered[0]), static_cast<std::int64_t>(gathered[1]),
             static_cast<std::int64_t>(gathered[2])};

  std::unique_ptr<Communicator> joined;
  if (wanted && address.process != 0) joined = join(address, group.rank());
  double votes[] = {joined ? 1.0 : 0.0};
  group.all_reduce_sum(votes);
  return votes[0] == group.size() ? std::move(joined) : nullptr;
}

}  // namespace normscope
