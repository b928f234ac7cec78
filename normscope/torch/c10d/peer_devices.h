// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include <c10/core/Device.h>

#include "normscope/comm/communicator.h"
#include "normscope/kernels/device_kernels.h"

namespace normscope::binding {

// Devices of ranks on one host, whose kernels exchange sums in each other's memory
// (core/peer_memory.h).
class PeerDevices {
 public:
  // For the current device of this type and its kernels. Collective. Returns nullptr on every rank
  // if the device of one of them cannot reach the others' memory. Throws the errors of messages.
  [[nodiscard]] static std::unique_ptr<PeerDevices> make(Communicator& ranks,
                                                         const DeviceKernels& kernels,
                                                         c10::DeviceType type,
                                                         std::chrono::milliseconds time_limit);

  // Ends the waits of kernels.
  ~PeerDevices() { end_waits(); }
  PeerDevices(const PeerDevices&) = delete;
  PeerDevices& operator=(const PeerDevices&) = delete;

  // Whether kernels of this device exchange the sums of so many channels.
  [[nodiscard]] bool exchange(std::int64_t channels, c10::Device device) const;

  // For the kernel that is queued on the stream next, which then waits for the one of the call
  // before. A rank that does not come within the time limit makes its sums NaN, and the next call
  // throws TimeoutError.
  [[nodiscard]] const PeerMemory& memory_for_next(Stream stream);

  // Kernels that wait for a rank, now or later, give NaN. Any thread may call this.
  void end_waits() noexcept;

 private:
  PeerDevices(const Communicator& ranks, const DeviceKernels& kernels, c10::Device device,
              std::chrono::milliseconds time_limit);

  const DeviceKernels& kernels_;
  c10::Device device_;
  std::chrono::milliseconds time_limit_;
  PeerMemory memory_;
  std::optional<Stream> last_;  // of the kernel before
};

}  // namespace normscope::binding
