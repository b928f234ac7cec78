// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "normscope/core/stream.h"

namespace normscope::testing {

// A stream of the device under test, for one thread at a time. It is not ordered with any other
// stream, so kernels of one may wait for kernels of another.
class DeviceStream {
 public:
  DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;
  ~DeviceStream();

  [[nodiscard]] Stream get() const noexcept { return stream_; }

  // Waits for everything that was queued on the stream.
  void wait() const;

  // Captures what queue_work() queues on the stream into a graph, and runs nothing. Each call of
  // the result queues the graph on the stream.
  [[nodiscard]] std::function<void()> capture(const std::function<void()>& queue_work) const;

 private:
  Stream stream_;
};

}  // namespace normscope::testing
