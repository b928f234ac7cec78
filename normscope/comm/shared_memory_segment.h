// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "normscope/comm/exchange_options.h"
#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// Where a process of this host finds the memory of a group. Three numbers, each exact as a float64,
// which the ranks can send to each other over any transport.
struct SharedMemoryAddress {
  std::int64_t process = 0;     // a process that holds the segment open
  std::int64_t descriptor = 0;  // in that process
  std::int64_t nonce = 0;       // distinguishes the segment from anything opened there later
};

// The memory of a group whose ranks are processes of one host. It has no name in any file system.
// The kernel frees it after the last process that has it open or mapped, however that process ends.
class SharedMemorySegment {
 public:
  // Creates the memory of a group. Throws ArgumentError, or CommunicationError if no memory or
  // descriptor is left.
  [[nodiscard]] static SharedMemorySegment create(int ranks, const ExchangeOptions& options = {});

  // Opens a segment that another process, or this one, has created and still holds open. Throws
  // CommunicationError if it is not there (any more).
  [[nodiscard]] static SharedMemorySegment open(const SharedMemoryAddress& address);

  // Opens the segment at a path /proc/PROCESS/fd/DESCRIPTOR without knowing its nonce, to read it
  // only. Throws CommunicationError, which says why the file is not one.
  [[nodiscard]] static SharedMemorySegment look_into(const std::string& path);

  // Valid for open() as long as this object exists. Also correct in a forked copy.
  [[nodiscard]] SharedMemoryAddress address() const;

  // The group's memory, initialized by SlotMemory. It may outlive this object, and keeps the
  // descriptor open: status_of_process() finds the segment through it.
  [[nodiscard]] const std::shared_ptr<void>& memory() const noexcept { return memory_; }
  [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }

 private:
  enum class Access { kRead, kWrite };

  static SharedMemorySegment open(const std::string& path, Access access);

  // `bytes`: of the whole file.
  SharedMemorySegment(std::shared_ptr<const int> descriptor, const std::shared_ptr<void>& mapping,
                      std::size_t bytes);

  std::shared_ptr<const int> descriptor_;
  std::shared_ptr<void> memory_;
  std::int64_t bytes_;
  std::int64_t nonce_;
};

}  // namespace normscope
