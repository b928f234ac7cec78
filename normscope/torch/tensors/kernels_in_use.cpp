// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/tensors/kernels_in_use.h"

#include <array>
#include <atomic>
#include <cstddef>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "normscope/core/environment.h"
#include "normscope/kernels/device_kernels.h"

namespace normscope::binding {
namespace {

// Whether the CUDA kernels of this build run on the device. Asked once per device, because the
// answer takes a call of the driver.
bool runs_cuda_kernels(c10::Device device) {
  enum : signed char { kUnknown, kYes, kNo };
  static std::array<std::atomic<signed char>, 256> answers;
  if (device_kernels() == nullptr) return false;
  std::atomic<signed char>& answer = answers.at(static_cast<std::size_t>(device.index() & 0xff));
  if (answer == kUnknown) {
    const c10::DeviceGuard guard(device);
    answer = device_kernels()->why_not().empty() ? kYes : kNo;
  }
  return answer == kYes;
}

}  // namespace

bool torch_kernels_are_forced() {
  static const bool forced = forces_torch_kernels();
  return forced;
}

bool uses_torch_kernels(const at::Tensor& x) {
  if (!x.defined()) return false;  // the kernels of the CPU notify the peers
  if (x.is_meta() || x.layout() != at::kStrided || x.is_quantized() || x.is_nested()) return false;
  if (torch_kernels_are_forced()) return true;
  if (x.is_cpu()) return false;
  return !x.is_cuda() || !runs_cuda_kernels(x.device());
}

bool has_synchronized_kernels(const at::Tensor& x) {
  auto& dispatcher = c10::Dispatcher::singleton();
  static const auto stats = dispatcher.findSchemaOrThrow("aten::batch_norm_stats", "");
  static const auto elemt = dispatcher.findSchemaOrThrow("aten::batch_norm_elemt", "out");
  const c10::DispatchKey key = c10::computeDispatchKey(std::nullopt, std::nullopt, x.device());
  return stats.hasKernelForDispatchKey(key) && elemt.hasKernelForDispatchKey(key);
}

std::string kernels_of_device(std::string_view device) {
  const at::Tensor x = at::empty({0}, at::TensorOptions().device(c10::Device(std::string(device))));
  if (!uses_torch_kernels(x)) {
    return x.is_cpu() ? "kernels of normscope, the same bits on any number of ranks"
                      : "CUDA kernels of normscope, the same bits on any number of ranks";
  }
  std::string text =
      has_synchronized_kernels(x) ? "torch's synchronized kernels" : "torch's native_batch_norm";
  if (torch_kernels_are_forced()) return text + ", because of NORMSCOPE_DEVICE_KERNELS=torch";
  if (!x.is_cuda()) return text + ", because normscope has no kernels for this device";
  if (device_kernels() == nullptr) {
    return text + ", because normscope was built without CUDA (NORMSCOPE_BUILD_CUDA)";
  }
  return text + ", because of normscope's CUDA kernels: " + device_kernels()->why_not();
}

}  // namespace normscope::binding
