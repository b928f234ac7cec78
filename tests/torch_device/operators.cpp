// SPDX-License-Identifier: Apache-2.0
//
// Operations of the device of tests. Almost all of them are the CPU's.
#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/resize.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "tests/torch_device/device.h"

namespace normscope::test_device {
namespace {

bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

at::Tensor on_device(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined()) return tensor;
  at::Tensor copy =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  on_host(copy).copy_(tensor);
  return copy;
}

// An operation on the device: its tensors in host memory, and how they go back.
class HostCall {
 public:
  c10::IValue argument(const c10::IValue& value) {
    if (value.isTensor()) return tensor(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back(tensor(one));
      return list;
    }
    if (value.isOptionalTensorList()) {  // indices, which may be the host's
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector()) {
        list.push_back(one && is_on_device(*one) ? view_of(*one) : one);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == kType) {
      meet(value.toDevice());
      return c10::Device(c10::DeviceType::CPU);
    }
    if (value.isGenerator() && value.toGenerator().device().type() == kType) {
      return on_host(value.toGenerator());
    }
    return value;
  }

  c10::IValue result(const c10::IValue& value) const {
    if (value.isTensor()) return back(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back(back(one));
      return list;
    }
    return value;
  }

  // Outputs that the operation has resized.
  void resize_outputs() const {
    for (const auto& [of_device, view] : views_) {
      if (view.sizes() == of_device.sizes()) continue;
      of_device.resize_(view.sizes());
      on_host(of_device).copy_(view);
    }
  }

  const at::Generator& generator() const { return default_generator(device_.index()); }

 private:
  at::Tensor tensor(const at::Tensor& given) {
    if (is_on_device(given)) return view_of(given);
    TORCH_CHECK(!given.defined() || given.dim() == 0,
                "Expected all tensors to be on the same device, got ", given.device(), " and ",
                kType);
    return given;
  }

  at::Tensor view_of(const at::Tensor& given) {
    meet(given.device());
    views_.emplace_back(given, on_host(given));
    return views_.back().second;
  }

  void meet(c10::Device device) {
    TORCH_CHECK(!has_device_ || !device.has_index() || device == device_,
                "Expected all tensors to be on the same device, got ", device, " and ", device_);
    if (device.has_index()) device_ = device;
    has_device_ = has_device_ || device.has_index();
  }

  at::Tensor back(const at::Tensor& found) const {
    if (!found.defined()) return found;
    for (const auto& [of_device, view] : views_) {
      if (found.is_same(view)) return of_device;
      if (!found.is_alias_of(view)) continue;
      auto alias = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW,
                                                            c10::Storage(of_device.storage()),
                                                            of_device.key_set(), found.dtype());
      alias.unsafeGetTensorImpl()->set_storage_offset(found.storage_offset());
      alias.unsafeGetTensorImpl()->set_sizes_and_strides(found.sizes(), found.strides());
      return alias;
    }
    return on_device(found, device_);
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> views_;  // of the device, in host memory
  c10::Device device_ = c10::impl::VirtualGuardImpl(kType).getDevice();
  bool has_device_ = false;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  TORCH_CHECK_NOT_IMPLEMENTED(op.schema().name().starts_with("aten::"), kType,
                              " has no kernel for ", op.schema().name());
  const auto begin = stack->end() - static_cast<std::ptrdiff_t>(arguments.size());
  HostCall call;
  std::transform(begin, stack->end(), begin,
                 [&](const auto& value) { return call.argument(value); });
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto at = begin + static_cast<std::ptrdiff_t>(i);
    if (arguments[i].name() == "generator" && at->isNone()) *at = on_host(call.generator());
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.resize_outputs();
  const auto results = stack->end() - static_cast<std::ptrdiff_t>(op.schema().returns().size());
  std::transform(results, stack->end(), results,
                 [&](const auto& value) { return call.result(value); });
}

// ---- What makes tensors, and copies between them -----------------------------------------------

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                 std::optional<bool> /*pin_memory*/, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device && device->has_index() ? device : std::nullopt);
  return at::detail::empty_generic(size, allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                         std::optional<at::Device> device, std::optional<bool> /*pin_memory*/) {
  const c10::OptionalDeviceGuard guard(device && device->has_index() ? device : std::nullopt);
  return at::detail::empty_strided_generic(size, stride, allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

at::Tensor host_or(const at::Tensor& tensor) {
  return is_on_device(tensor) ? on_host(tensor) : tensor;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool /*non_blocking*/) {
  host_or(to).copy_(host_or(from));
  return to;
}

const at::Tensor& resize_tensor(const at::Tensor& self, at::IntArrayRef size,
                                std::optional<at::MemoryFormat> format) {
  auto* const impl = self.unsafeGetTensorImpl();
  const std::size_t bytes = at::detail::computeStorageNbytesContiguous(
      size, self.dtype().itemsize(), static_cast<std::size_t>(self.storage_offset()));
  if (bytes > self.storage().nbytes()) resize(self.storage(), bytes);
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  // NOLINTNEXTLINE(bugprone-return-const-ref-from-parameter): torch's signature
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, std::int64_t offset,
                        at::IntArrayRef size, at::IntArrayRef stride) {
  return at::cpu::set_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto size = static_cast<std::int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::cpu::set_(self, std::move(source), 0, size, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::cpu::set_(self, source.storage(), source.storage_offset(), source.sizes(),
                       source.strides());
}

// torch lets each other device replace convolutions.
at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, std::int64_t groups) {
  const std::optional<at::Tensor> host_bias =
      bias && bias->defined() ? std::optional(on_host(*bias)) : std::nullopt;
  return on_device(at::convolution(on_host(x), on_host(weight), host_bias, stride, padding,
                                   dilation, transposed, output_padding, groups),
                   x.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, std::int64_t groups, std::array<bool, 3> mask) {
  const std::int64_t channels = dy.size(1);
  const auto [dx, dweight, dbias] =
      at::convolution_backward(on_host(dy), on_host(x), on_host(weight), at::IntArrayRef(channels),
                               stride, padding, dilation, transposed, output_padding, groups, mask);
  return {on_device(dx, x.device()), on_device(dweight, x.device()), on_device(dbias, x.device())};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("resize_", resize_tensor);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
}

// ---- For tests/support/torch_device.py ---------------------------------------------------------

at::Tensor generator_state(std::int64_t device) {
  return default_generator(static_cast<c10::DeviceIndex>(device)).get_state();
}

void set_generator_state(std::int64_t device, const at::Tensor& state) {
  at::Generator generator = default_generator(static_cast<c10::DeviceIndex>(device));
  generator.set_state(state);
}

void seed_generators(std::int64_t seed) {
  for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
    at::Generator generator = default_generator(device);
    generator.set_current_seed(static_cast<std::uint64_t>(seed));
  }
}

TORCH_LIBRARY(test_device, m) {
  m.def("generator_state(int device) -> Tensor", generator_state);
  m.def("set_generator_state(int device, Tensor state) -> ()", set_generator_state);
  m.def("seed_generators(int seed) -> ()", seed_generators);
}

}  // namespace
}  // namespace normscope::test_device
