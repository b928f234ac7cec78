// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/tensors/device_scratch.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

namespace normscope::binding {
namespace {

struct Zeros {
  double* data = nullptr;
  std::int64_t size = 0;
};

double* new_scratch(const at::Tensor& x, std::int64_t size, const DeviceContext& device) {
  const std::string why_not = device.kernels->why_not();
  TORCH_CHECK(why_not.empty(),
              "x: expected a tensor on a device that this build of normscope has kernels for, got "
              "one on ",
              x.device(), ": ", why_not);
  return device.kernels->new_zeros(device.stream, size);
}

}  // namespace

double* device_scratch(const at::Tensor& x, std::int64_t size, const DeviceContext& device) {
  if (device.kernels->is_capturing(device.stream)) return new_scratch(x, size, device);
  using Key = std::tuple<c10::DeviceType, c10::DeviceIndex, void*>;  // identifies a stream
  static std::mutex mutex;
  static std::map<Key, Zeros> of_stream;
  const std::lock_guard lock(mutex);
  Zeros& kept = of_stream[{x.device().type(), x.device().index(), device.stream.handle}];
  if (kept.data == nullptr || kept.size < size) {
    // Queued kernels may still use the smaller one, so it is never freed. Doubling limits the
    // waste.
    const std::int64_t enough = std::max(size, 2 * kept.size);
    kept = {new_scratch(x, enough, device), enough};
  }
  return kept.data;
}

}  // namespace normscope::binding
