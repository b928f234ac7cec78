// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "normscope/core/stream.h"
#include "normscope/kernels/device_kernels.h"

namespace normscope::cuda_on_host {

// The CUDA backend's kernels and grids, run on the host.
extern const DeviceKernels kKernels;

// The number of kernels launched so far.
[[nodiscard]] int launches() noexcept;

// The number of those that were launched early, by the thread that launched a kernel before which
// has let the next one start.
[[nodiscard]] int early_starts() noexcept;

// How often warps execute an instruction that loads or stores a pack, an element or a coefficient,
// in `work`. No other thread may launch kernels meanwhile.
struct MemoryInstructions {
  std::int64_t loads;
  std::int64_t stores;
};
[[nodiscard]] MemoryInstructions memory_instructions(const std::function<void()>& work);

// Runs work of a stream in the calling thread, and returns when it has ended. One stream's work
// runs one after the other, whichever thread queues it; that of several streams runs concurrently.
// While the stream is being captured, nothing runs.
void queue(Stream stream, const std::function<void()>& work);

[[nodiscard]] bool is_capturing(Stream stream);

// Shows what a kernel does before it has waited for the one before it. While it exists, early
// kernels of the calling thread find in these spans, until they have waited, what was there when
// the last kernel that does not start early began. Such a kernel throws std::logic_error if it
// writes there before it has waited.
class EarlierMemory {
 public:
  explicit EarlierMemory(const std::vector<std::span<std::byte>>& spans);
  EarlierMemory(const EarlierMemory&) = delete;
  EarlierMemory& operator=(const EarlierMemory&) = delete;
  ~EarlierMemory();
};

}  // namespace normscope::cuda_on_host
