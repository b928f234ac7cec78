// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "tests/kernels/cuda_on_host/backend.h"
#include "tests/kernels/device_stream.h"

namespace normscope {
namespace cuda_on_host {
namespace {

using Graph = std::vector<std::function<void()>>;

struct Queue {
  std::mutex mutex;
  std::unique_ptr<Graph> captured;  // null: not being captured
};

// Handles need not be addresses of anything.
Queue& queue_of(Stream stream) {
  static std::mutex mutex;
  static std::map<void*, Queue> queues;
  const std::lock_guard lock(mutex);
  return queues[stream.handle];
}

}  // namespace

void queue(Stream stream, const std::function<void()>& work) {
  Queue& queue = queue_of(stream);
  const std::lock_guard lock(queue.mutex);
  if (queue.captured != nullptr) {
    queue.captured->push_back(work);
  } else {
    work();
  }
}

bool is_capturing(Stream stream) {
  Queue& queue = queue_of(stream);
  const std::lock_guard lock(queue.mutex);
  return queue.captured != nullptr;
}

}  // namespace cuda_on_host

namespace testing {

DeviceStream::DeviceStream() {
  static std::atomic<std::uintptr_t> streams = 0;
  stream_ = {.handle = reinterpret_cast<void*>(++streams), .memory = Memory::kDevice};
}

DeviceStream::~DeviceStream() = default;

void DeviceStream::wait() const {}  // what is queued has ended

std::function<void()> DeviceStream::capture(const std::function<void()>& queue_work) const {
  cuda_on_host::Queue& queue = cuda_on_host::queue_of(stream_);
  const auto exchange_captured = [&](std::unique_ptr<cuda_on_host::Graph> graph) {
    const std::lock_guard lock(queue.mutex);
    return std::exchange(queue.captured, std::move(graph));
  };
  (void)exchange_captured(std::make_unique<cuda_on_host::Graph>());
  queue_work();
  return [stream = stream_, graph = std::shared_ptr(exchange_captured(nullptr))] {
    for (const auto& work : *graph) cuda_on_host::queue(stream, work);
  };
}

}  // namespace testing
}  // namespace normscope
