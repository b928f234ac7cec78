// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/tensors/device_memory.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include <ATen/ops/empty.h>

namespace normscope::binding {
namespace {

std::mutex& mutex() {
  static std::mutex of_all;
  return of_all;
}

// The memory of the stream; nullptr while it is captured. References to it stay valid.
DeviceMemory::OfStream* stream_of(const DeviceContext& device, const at::Tensor& x) {
  if (device.kernels->is_capturing(device.stream)) return nullptr;
  using Key = std::tuple<c10::DeviceType, c10::DeviceIndex, void*>;  // identifies a stream
  // Never destroyed: other threads may be inside a call when the program ends.
  static auto& of_stream = *new std::map<Key, DeviceMemory::OfStream>;
  const std::lock_guard lock(mutex());
  return &of_stream[{x.device().type(), x.device().index(), device.stream.handle}];
}

double* new_zeros(const at::Tensor& x, std::int64_t size, const DeviceContext& device) {
  const std::string why_not = device.kernels->why_not();
  TORCH_CHECK(why_not.empty(),
              "x: expected a tensor on a device that this build of normscope has kernels for, got "
              "one on ",
              x.device(), ": ", why_not);
  return device.kernels->new_zeros(device.stream, size);
}

// Queued kernels may still use a smaller block, so it is never freed. Doubling limits the waste.
void grow(DeviceMemory::Block& block, std::int64_t size, const at::Tensor& x,
          const DeviceContext& device) {
  if (block.data != nullptr && block.size >= size) return;
  const std::int64_t enough = std::max(size, 2 * block.size);
  block = {new_zeros(x, enough, device), enough};
}

}  // namespace

DeviceMemory::DeviceMemory(OfStream* stream) : stream_(stream) {
  if (stream_ == nullptr) return;
  const std::lock_guard lock(mutex());
  auto& [unused, taken] = *stream_;
  unused.reserve(unused.size() + taken + 1);
  taken += 1;
  if (unused.empty()) return;
  kept_ = unused.back();
  unused.pop_back();
}

// If it throws, the destructor gives back what the other constructor took.
DeviceMemory::DeviceMemory(const at::Tensor& x, std::int64_t slices, DeviceContext& device)
    : DeviceMemory(stream_of(device, x)) {
  const std::int64_t channels = x.size(1);
  const std::int64_t workspace = workspace_size(channels, slices);
  const std::int64_t scratch = device_scratch_size(channels, slices);
  grow(kept_.scratch, scratch, x, device);
  device.scratch = kept_.scratch.data;
  if (stream_ != nullptr) {
    grow(kept_.workspace, workspace, x, device);
    device.workspace = kept_.workspace.data;
  } else {
    of_graph_ = at::empty({workspace}, x.options().dtype(at::kDouble));
    device.workspace = of_graph_.mutable_data_ptr<double>();
  }
}

DeviceMemory::~DeviceMemory() {
  if (stream_ == nullptr) return;
  const std::lock_guard lock(mutex());
  stream_->unused.push_back(kept_);
  stream_->taken -= 1;
}

}  // namespace normscope::binding
