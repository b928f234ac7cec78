// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "normscope/core/stream.h"
#include "normscope/kernels/device_kernels.h"

namespace normscope::cuda_on_host {

// The CUDA backend's kernels and grids, run on the host.
extern const DeviceKernels kKernels;

// The number of kernels launched so far.
[[nodiscard]] int launches() noexcept;

// Runs work of a stream in the calling thread, and returns when it has ended. One stream's work
// runs one after the other, whichever thread queues it; that of several streams runs concurrently.
// While the stream is being captured, nothing runs.
void queue(Stream stream, const std::function<void()>& work);

[[nodiscard]] bool is_capturing(Stream stream);

}  // namespace normscope::cuda_on_host
