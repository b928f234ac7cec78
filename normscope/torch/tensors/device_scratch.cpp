// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/tensors/device_scratch.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include "normscope/torch/tensors/results.h"

namespace normscope::binding {
namespace {

struct KeptScratch {
  using Key = std::tuple<c10::DeviceType, c10::DeviceIndex, void*>;  // identifies a stream

  std::mutex mutex;
  std::map<Key, at::Tensor> of_stream;
};

// Never destroyed: when the program ends, torch may already be gone.
KeptScratch& kept_scratch() {
  static auto& kept = *new KeptScratch;
  return kept;
}

void check_device(const at::Tensor& x, const DeviceKernels& kernels) {
  const std::string why_not = kernels.why_not();
  TORCH_CHECK(why_not.empty(),
              "x: expected a tensor on a device that this build of normscope has kernels for, got "
              "one on ",
              x.device(), ": ", why_not);
}

}  // namespace

at::Tensor device_scratch(const at::Tensor& x, std::int64_t size, const DeviceContext& device) {
  if (device.kernels->is_capturing(device.stream)) {
    check_device(x, *device.kernels);
    return at::zeros({size}, float64_options(x));
  }
  auto& [mutex, of_stream] = kept_scratch();
  const std::lock_guard lock(mutex);
  at::Tensor& kept = of_stream[{x.device().type(), x.device().index(), device.stream.handle}];
  const std::int64_t before = kept.defined() ? kept.numel() : 0;
  if (!kept.defined() || before < size) {
    check_device(x, *device.kernels);
    // Queued kernels may still use the smaller one, so it is never freed. Doubling limits the
    // waste.
    const std::int64_t enough = std::max(size, 2 * before);
    kept = at::for_blob(device.kernels->new_zeros(device.stream, enough), {enough})
               .options(float64_options(x))
               .target_device(x.device())
               .make_tensor();
  }
  return kept;
}

}  // namespace normscope::binding
