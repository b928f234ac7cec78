// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "normscope/core/stream.h"

namespace normscope::cuda_on_host {

// Runs work of a stream in the calling thread, and returns when it has ended. One stream's work
// runs one after the other, whichever thread queues it; that of several streams runs concurrently.
// While the stream is being captured, nothing runs.
void queue(Stream stream, const std::function<void()>& work);

[[nodiscard]] bool is_capturing(Stream stream);

}  // namespace normscope::cuda_on_host
