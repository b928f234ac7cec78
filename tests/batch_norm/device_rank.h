// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/core/cache_lines.h"
#include "normscope/core/error.h"
#include "tests/batch_norm/layer_run.h"
#include "tests/comm/worlds.h"
#include "tests/kernels/device_stream.h"
#include "tests/kernels/kernels_under_test.h"
#include "tests/support/text_of.h"

namespace normscope::testing {

// In tests, the host can access the device's memory. This adds messages there, on the host.
class HostedCommunicator final : public BorrowedCommunicator {
 public:
  using BorrowedCommunicator::BorrowedCommunicator;

  void all_reduce_sum(std::span<double> values, Stream /*stream*/) override {
    BorrowedCommunicator::all_reduce_sum(values, {});
  }
};

// Ranks on a device whose messages are added on the host.
[[nodiscard]] inline RunRanks hosted(const RunRanks& run) {
  return [run](int ranks, const ExchangeOptions& options, const CommunicatorBody& body) {
    run(ranks, options, [&](Communicator& communicator) {
      HostedCommunicator on_host(communicator);
      body(on_host);
    });
  };
}

// What a rank needs for calls on its device, with a stream of its own. The workspace's earlier
// contents do not matter.
class DeviceRank {
 public:
  explicit DeviceRank(Exchange* exchange, std::int64_t channels = 5, std::int64_t slices = 1)
      : workspace_(static_cast<std::size_t>(workspace_size(channels, slices)),
                   std::numeric_limits<double>::quiet_NaN()),
        scratch_(static_cast<std::size_t>(device_scratch_size(channels, slices))),
        exchange_(exchange) {
    device_ = {.kernels = &device_kernels_under_test(),
               .stream = stream_.get(),
               .workspace = workspace_.data(),
               .scratch = scratch_.data(),
               .report = report_.get()};
  }
  DeviceRank(const DeviceRank&) = delete;
  DeviceRank& operator=(const DeviceRank&) = delete;

  [[nodiscard]] CallContext context() {
    CallContext context = context_of(exchange_);
    context.device = &device_;
    return context;
  }
  [[nodiscard]] DeviceContext& device() { return device_; }
  [[nodiscard]] const DeviceStream& stream() const { return stream_; }

  [[nodiscard]] const std::vector<double>& scratch() const { return scratch_; }

 private:
  const DeviceStream stream_;
  AlignedVector<double> workspace_;
  std::vector<double> scratch_;
  std::unique_ptr<DeviceReport> report_ = std::make_unique<DeviceReport>();
  DeviceContext device_;
  Exchange* exchange_;
};

template <class Result, class... Arguments>
Result refuse_to_launch(Arguments... /*arguments*/) {
  throw DeviceError("cuda: out of memory");
}

// Kernels of a device that refuses to launch the first one of a forward.
[[nodiscard]] inline DeviceKernels kernels_without_memory() {
  DeviceKernels kernels = device_kernels_under_test();
  kernels.send_moments = refuse_to_launch;
  kernels.exchange_moments = refuse_to_launch;
  return kernels;
}

inline void expect_nan(const Tensor& tensor) {
  tensor.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
    ASSERT_THAT(tensor.at(n, c, p), ::testing::IsNan());
  });
}

// All outputs of the forward are NaN, and nothing was updated.
inline void expect_nan(const LayerRun& run) {
  EXPECT_THAT(run.statistics, ::testing::Each(::testing::IsNan()));
  EXPECT_THAT(run.counts, ::testing::Each(::testing::IsNan()));
  EXPECT_THAT(run.running_mean.values(), ::testing::Each(0.5));
  EXPECT_THAT(run.running_var.values(), ::testing::Each(2.0));
  expect_nan(run.y);
}

// The text of the error, of type Expected, that a call throws after the device has found it.
template <class Expected>
[[nodiscard]] std::string error_of_next_call(DeviceRank& device) {
  LayerRun next(Layer{}, first_samples(2));
  return text_of<Expected>([&] { next.step(device.context()); });
}

}  // namespace normscope::testing
