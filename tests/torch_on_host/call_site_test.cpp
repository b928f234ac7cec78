// SPDX-License-Identifier: Apache-2.0
//
// What a call on a device takes from torch.
#include "normscope/torch/ops/call_site.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/torch/ops/backends.h"
#include "normscope/torch/tensors/device_memory.h"
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

// What torch's allocator gave since this object was made.
class Allocations {
 public:
  Allocations() {
    allocator_.count = 0;
    c10::SetCPUAllocator(&allocator_, /*priority=*/1);
  }
  Allocations(const Allocations&) = delete;
  Allocations& operator=(const Allocations&) = delete;
  ~Allocations() { c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), /*priority=*/1); }

  int count() const { return allocator_.count; }

 private:
  static inline CountingAllocator allocator_;
};

// docs/decisions/0015: "Memory".
TEST(AllocationsTest, ACallAllocatesItsResultsAlone) {
  const at::Tensor x = at::randn({2, 3, 4});
  const OptionalTensor weight = at::ones({3});
  const OptionalTensor none;
  const ForwardOpArguments forward{.x = x,
                                   .weight = weight,
                                   .bias = none,
                                   .running = {none, none, none},
                                   .momentum = 0.1,
                                   .eps = 1e-5,
                                   .dims = {},
                                   .slice_stats = "pooled",
                                   .call = {.scope = "local", .group_name = "", .layer = ""},
                                   .needs_backward = true,
                                   .activation = {},
                                   .graph = std::nullopt};
  static_cast<void>(backend::forward(forward));  // the first call on the stream

  const Allocations of_forward;
  const auto [y, statistics, spread, counts] = backend::forward(forward);
  EXPECT_EQ(of_forward.count(), 2);  // y, statistics
  const Allocations of_backward;
  const auto done = backend::backward({y, x, weight, statistics, {true, true, true}, forward.call});
  EXPECT_EQ(of_backward.count(), 3);  // dx, dweight, dbias
}

// The host in place of a device, with the properties that a test sets.
class DeviceMemoryTest : public ::testing::Test {
 protected:
  DeviceMemoryTest() {
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

  // The memory of a call that begins now. It ends with the test, or at end_call().
  DeviceContext call(std::int64_t channels = 3) {
    calls_.push_back(std::make_unique<DeviceMemory>(at::empty({2, channels}), 1, device_));
    return device_;
  }
  void end_call() { calls_.pop_back(); }

  DeviceContext finished_call(std::int64_t channels = 3) {
    const DeviceContext device = call(channels);
    end_call();
    return device;
  }

  static inline std::string why_not;
  static inline bool is_capturing = false;
  DeviceKernels kernels_ = cuda_on_host::kKernels;
  DeviceContext device_;

 private:
  std::vector<std::unique_ptr<DeviceMemory>> calls_;
};

TEST_F(DeviceMemoryTest, CallsOnAStreamShareItAndItGrows) {
  const DeviceContext first = finished_call(10);
  EXPECT_EQ(finished_call(7).scratch, first.scratch);
  EXPECT_EQ(finished_call(7).workspace, first.workspace);
  const DeviceContext larger = finished_call(100);

  EXPECT_NE(larger.scratch, first.scratch);
  EXPECT_NE(larger.workspace, first.workspace);
  EXPECT_THAT(std::vector(larger.scratch, larger.scratch + device_scratch_size(100, 1)), Each(0.0));
  EXPECT_EQ(finished_call(10).scratch, larger.scratch);
  EXPECT_EQ(finished_call(10).workspace, larger.workspace);
}

// Another thread may queue work on the stream between the kernels of a call.
TEST_F(DeviceMemoryTest, CallsAtTheSameTimeDoNotShareIt) {
  const DeviceContext one = call();
  const DeviceContext other = call();

  EXPECT_NE(other.workspace, one.workspace);
  EXPECT_NE(other.scratch, one.scratch);
  end_call();
  EXPECT_EQ(call().workspace, other.workspace);
}

TEST_F(DeviceMemoryTest, ItsWorkspaceIsAligned) {
  for (std::int64_t channels = 1; channels <= 16; ++channels) {
    const auto address = reinterpret_cast<std::uintptr_t>(call(channels).workspace);
    EXPECT_EQ(address % 64, 0) << channels;
  }
}

// With torch.compile(mode="reduce-overhead") and torch.cuda.use_mem_pool, torch allocates from a
// pool during a call, and may use this memory again after it.
TEST_F(DeviceMemoryTest, IsNotMemoryOfTorchsAllocator) {
  const at::Tensor x = at::empty({2, 3});
  const Allocations allocations;
  static_cast<void>(DeviceMemory(x, 1, device_));
  EXPECT_EQ(allocations.count(), 0);
  // If the zeros were, the graph would have to clear them in each replay.
  is_capturing = true;
  static_cast<void>(DeviceMemory(x, 1, device_));
  EXPECT_EQ(allocations.count(), 1);  // the workspace
}

TEST_F(DeviceMemoryTest, StreamsDoNotShareIt) {
  const DeviceContext first = finished_call();
  int other = 0;
  device_.stream.handle = &other;

  EXPECT_NE(finished_call().scratch, first.scratch);
  EXPECT_NE(finished_call().workspace, first.workspace);
}

TEST_F(DeviceMemoryTest, ACapturedCallHasItsOwn) {
  const DeviceContext of_stream = finished_call();
  is_capturing = true;
  const DeviceContext captured = call();
  const DeviceContext other = call();
  is_capturing = false;

  EXPECT_NE(captured.scratch, of_stream.scratch);
  EXPECT_NE(captured.workspace, of_stream.workspace);
  EXPECT_NE(other.scratch, captured.scratch);
  EXPECT_NE(other.workspace, captured.workspace);
  EXPECT_EQ(call().scratch, of_stream.scratch);
}

TEST_F(DeviceMemoryTest, ACallThatGetsNoneLosesNone) {
  const DeviceContext before = finished_call();
  why_not = "the driver is old";
  EXPECT_THROW(call(100), c10::Error);
  why_not = "";

  EXPECT_EQ(finished_call().scratch, before.scratch);
}

TEST_F(DeviceMemoryTest, ADeviceThatCannotRunTheKernelsIsRefusedWithTheReason) {
  why_not = "the driver is old";

  EXPECT_THAT([&] { call(); },
              ThrowsMessage<c10::Error>(
                  HasSubstr("x: expected a tensor on a device that this build of normscope has "
                            "kernels for, got one on cpu: the driver is old")));
}

}  // namespace
}  // namespace normscope::binding
