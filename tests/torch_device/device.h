// SPDX-License-Identifier: Apache-2.0
//
// A device type of torch (PrivateUse1) for tests, with two devices. The host cannot access its
// memory: the addresses of its tensors belong to pages without any permission. Operations work on
// host memory that each of these addresses stands for, by the CPU's kernels. They end before they
// return; streams and events only keep order.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace normscope::test_device {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;

[[nodiscard]] c10::Allocator* allocator();

// A CPU tensor over the host memory that a tensor of the device stands for. It keeps this memory.
[[nodiscard]] at::Tensor on_host(const at::Tensor& tensor);

// The generator of the CPU that a generator of the device stands for.
[[nodiscard]] at::Generator on_host(const at::Generator& generator);

// The generator that operations of a device use if they are given none.
[[nodiscard]] const at::Generator& default_generator(c10::DeviceIndex device);

void resize(const c10::Storage& storage, std::size_t bytes);

}  // namespace normscope::test_device
