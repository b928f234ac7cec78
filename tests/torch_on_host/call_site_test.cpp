// SPDX-License-Identifier: Apache-2.0
//
// What a call on a device takes from torch.
#include "normscope/torch/ops/call_site.h"

#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/torch/tensors/device_scratch.h"
#include "tests/kernels/cuda_on_host/backend.h"

namespace normscope::binding {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// A device type with eight devices, of which this process knows only which one is current.
using Devices = c10::impl::FakeGuardImpl<c10::DeviceType::PrivateUse1>;
C10_REGISTER_GUARD_IMPL(PrivateUse1, Devices)

at::Tensor tensor_on(c10::Device device) {
  return at::detail::make_tensor<c10::TensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(at::kFloat),
      device);
}

// Process groups make what they need on the current device. The first exchange needs it before a
// call allocates any memory.
TEST(CallSiteTest, TheDeviceOfXIsCurrentFromTheBeginning) {
  Devices::setDeviceIndex(0);
  {
    const CallSite site(tensor_on({c10::DeviceType::PrivateUse1, 3}));

    EXPECT_EQ(Devices::getDeviceIndex(), 3);
    EXPECT_EQ(site.placement().device, c10::DeviceType::PrivateUse1);
  }
  EXPECT_EQ(Devices::getDeviceIndex(), 0);
}

// torch's allocator for the host, which counts what it allocates.
struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    count += 1;
    return c10::GetDefaultCPUAllocator()->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return c10::GetDefaultCPUAllocator()->raw_deleter();
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  int count = 0;
};

// The host in place of a device, with the properties that a test sets.
class DeviceScratchTest : public ::testing::Test {
 protected:
  DeviceScratchTest() {
    kernels_.why_not = [] { return why_not; };
    kernels_.is_capturing = [](Stream /*stream*/) { return is_capturing; };
    // A stream of this test's own, also if this object is where that of another test was.
    static std::vector<std::unique_ptr<int>> streams;
    streams.push_back(std::make_unique<int>());
    device_ = {.kernels = &kernels_,
               .stream = {.handle = streams.back().get(), .memory = Memory::kDevice}};
    why_not = "";
    is_capturing = false;
  }

  double* scratch(std::int64_t size) const { return device_scratch(x_, size, device_); }

  static inline std::string why_not;
  static inline bool is_capturing = false;
  const at::Tensor x_ = at::empty({2, 3});
  DeviceKernels kernels_ = cuda_on_host::kKernels;
  DeviceContext device_;
};

TEST_F(DeviceScratchTest, CallsOnAStreamShareItAndItGrows) {
  double* const first = scratch(10);
  EXPECT_EQ(scratch(7), first);
  double* const larger = scratch(100);

  EXPECT_NE(larger, first);
  EXPECT_THAT(std::vector(larger, larger + 100), Each(0.0));
  EXPECT_EQ(scratch(10), larger);
}

// With torch.compile(mode="reduce-overhead") and torch.cuda.use_mem_pool, torch allocates from a
// pool during a call, and may use this memory again after it.
TEST_F(DeviceScratchTest, IsNotMemoryOfTorchsAllocator) {
  static CountingAllocator allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/1);
  scratch(10);
  // If it were, the graph would have to clear it in each replay.
  is_capturing = true;
  scratch(10);
  c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), /*priority=*/1);

  EXPECT_EQ(allocator.count, 0);
}

TEST_F(DeviceScratchTest, StreamsDoNotShareIt) {
  double* const first = scratch(10);
  int other = 0;
  device_.stream.handle = &other;

  EXPECT_NE(scratch(10), first);
}

TEST_F(DeviceScratchTest, ACapturedCallHasItsOwn) {
  double* const of_stream = scratch(10);
  is_capturing = true;
  double* const captured = scratch(10);

  EXPECT_NE(captured, of_stream);
  EXPECT_NE(scratch(10), captured);
  is_capturing = false;
  EXPECT_EQ(scratch(10), of_stream);
}

TEST_F(DeviceScratchTest, ADeviceThatCannotRunTheKernelsIsRefusedWithTheReason) {
  why_not = "the driver is old";

  EXPECT_THAT([&] { static_cast<void>(scratch(10)); },
              ThrowsMessage<c10::Error>(
                  HasSubstr("x: expected a tensor on a device that this build of normscope has "
                            "kernels for, got one on cpu: the driver is old")));
}

}  // namespace
}  // namespace normscope::binding
