// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "normscope/comm/exchange_options.h"
#include "normscope/core/export.h"

namespace normscope NORMSCOPE_EXPORT {

// Where a process of this host finds the memory of a group. Three numbers, each exact as a float64,
// that the ranks send each other by whatever means they have.
struct SharedMemoryAddress {
  std::int64_t process = 0;     // that holds the segment open
  std::int64_t descriptor = 0;  // of that process
  std::int64_t nonce = 0;       // tells this segment from whatever else may be found there later
};

// The memory of a group whose ranks are processes of one host. It has no name in any file system
// and ends with the last process that has it open or mapped, however that process ends.
class SharedMemorySegment {
 public:
  // Makes the memory of a group. Throws ArgumentError, or CommunicationError where there is no
  // memory or descriptor left.
  [[nodiscard]] static SharedMemorySegment create(int ranks, const ExchangeOptions& options = {});

  // Opens what another process, or this one, has created and still holds. Throws CommunicationError
  // where the segment is not there (any more).
  [[nodiscard]] static SharedMemorySegment open(const SharedMemoryAddress& address);

  // Opens what lies at such a path of /proc, to look at. Throws CommunicationError.
  [[nodiscard]] static SharedMemorySegment look_into(const std::string& path);

  // Good for open() as long as this object lives, also for the copy of it that a fork makes.
  [[nodiscard]] SharedMemoryAddress address() const;

  // The group's memory as SlotMemory has initialized it; stays when this object ends, and
  // open, so that a process can be looked into.
  [[nodiscard]] const std::shared_ptr<void>& memory() const noexcept { return memory_; }

 private:
  SharedMemorySegment(std::shared_ptr<const int> descriptor, const std::shared_ptr<void>& mapping);

  std::shared_ptr<const int> descriptor_;
  std::shared_ptr<void> memory_;
  std::int64_t nonce_;
};

}  // namespace normscope
