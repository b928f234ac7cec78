// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/tensors/device_scratch.h"

#include <map>
#include <mutex>
#include <tuple>

#include <ATen/ops/zeros.h>

#include "normscope/torch/tensors/results.h"

namespace normscope::binding {
namespace {

struct KeptScratch {
  using Key = std::tuple<c10::DeviceType, c10::DeviceIndex, void*>;  // identifies a stream

  std::mutex mutex;
  std::map<Key, at::Tensor> of_stream;
};

// Never destroyed: when the program ends, the tensors' allocator may already be gone.
KeptScratch& kept_scratch() {
  static auto& kept = *new KeptScratch;
  return kept;
}

at::Tensor new_scratch(const at::Tensor& x, std::int64_t size, const DeviceKernels& kernels) {
  TORCH_CHECK(kernels.can_run(),
              "x: expected a tensor on a device that this build of normscope has "
              "kernels for (NORMSCOPE_CUDA_ARCHITECTURES), got one on ",
              x.device());
  return at::zeros({size}, float64_options(x));
}

}  // namespace

at::Tensor device_scratch(const at::Tensor& x, std::int64_t size, const DeviceContext& device) {
  if (device.kernels->is_capturing(device.stream)) return new_scratch(x, size, *device.kernels);
  auto& [mutex, of_stream] = kept_scratch();
  const std::lock_guard lock(mutex);
  at::Tensor& kept = of_stream[{x.device().type(), x.device().index(), device.stream.handle}];
  if (!kept.defined() || kept.numel() < size) kept = new_scratch(x, size, *device.kernels);
  return kept;
}

}  // namespace normscope::binding
