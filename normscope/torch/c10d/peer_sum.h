// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>

#include <c10/core/Device.h>

#include "normscope/comm/communicator.h"
#include "normscope/kernels/device_kernels.h"

namespace normscope::binding {

// Sums messages in device memory by kernels of the ranks, which write them into the memory of each
// other's devices (kernels/peer_memory.h). All ranks are on one host.
class PeerSum {
 public:
  // For messages on the current device of this type, by its kernels. Collective. Returns nullptr on
  // every rank if the device of one of them cannot reach the others' memory. Throws the errors of
  // messages.
  [[nodiscard]] static std::unique_ptr<PeerSum> make(Communicator& ranks,
                                                     const DeviceKernels& kernels,
                                                     c10::DeviceType type,
                                                     std::chrono::milliseconds time_limit);

  // Ends the waits of kernels.
  ~PeerSum() { end_waits(); }
  PeerSum(const PeerSum&) = delete;
  PeerSum& operator=(const PeerSum&) = delete;

  // Whether it sums messages of this size on this device.
  [[nodiscard]] bool takes(std::size_t size, c10::Device device) const;

  // `sum` becomes the sum over the ranks, on the stream, which first waits for earlier sums.
  // Nothing waits on the host. A rank that does not come within the time limit makes it NaN, and
  // the next call throws TimeoutError.
  void all_reduce_sum(std::span<double> sum, Stream stream);

  // Kernels that wait for a rank, now or later, give NaN. Any thread may call this.
  void end_waits() noexcept;

 private:
  PeerSum(const Communicator& ranks, const DeviceKernels& kernels, c10::Device device,
          std::chrono::milliseconds time_limit);

  const DeviceKernels& kernels_;
  c10::Device device_;
  std::chrono::milliseconds time_limit_;
  PeerMemory memory_;
  std::optional<Stream> last_;  // of the sum before
};

}  // namespace normscope::binding
