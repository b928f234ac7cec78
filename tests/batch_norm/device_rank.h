// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "tests/batch_norm/layer_run.h"
#include "tests/kernels/kernels_under_test.h"

namespace normscope::testing {

// Tests keep a device's memory where the host can reach it, and its communicators can add.
class HostedCommunicator : public BorrowedCommunicator {
 public:
  using BorrowedCommunicator::BorrowedCommunicator;

  void all_reduce_sum(std::span<double> values, Stream /*stream*/) override {
    BorrowedCommunicator::all_reduce_sum(values, {});
  }
};

// What a rank needs for calls on its device; what was in the workspace before does not matter.
class DeviceRank {
 public:
  explicit DeviceRank(Exchange* exchange, std::int64_t channels = 5)
      : workspace_(static_cast<std::size_t>(workspace_size(channels)),
                   std::numeric_limits<double>::quiet_NaN()),
        exchange_(exchange) {}

  [[nodiscard]] CallContext context() {
    CallContext context = context_of(exchange_);
    context.kernels = kernels_under_test().front();
    context.workspace = workspace_.data();
    context.report = report_.get();
    return context;
  }

 private:
  std::vector<double> workspace_;
  std::unique_ptr<DeviceReport> report_ = std::make_unique<DeviceReport>();
  Exchange* exchange_;
};

}  // namespace normscope::testing
