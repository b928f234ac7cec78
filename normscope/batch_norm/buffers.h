// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/batch_norm/exchange.h"
#include "normscope/core/cache_lines.h"
#include "normscope/core/limbs.h"
#include "normscope/kernels/results.h"

namespace normscope {

// The message of one direction, for all channels: the limbs of its sums, then the header of
// Exchange. Before it, in the same allocation: `results` numbers that follow from the sums.
class Message {
 public:
  explicit Message(std::int64_t channels, std::int64_t results = 0)
      : channels_(channels),
        results_(static_cast<std::size_t>(results)),
        numbers_(results_ + static_cast<std::size_t>(limbs_size(channels) + kHeaderSize)) {}

  [[nodiscard]] LimbsView limbs() noexcept {
    return {numbers_.data() + results_, channels_, channels_};
  }
  [[nodiscard]] double* results() noexcept { return numbers_.data(); }

  // Replaces the limbs by their totals over the ranks; returns the total count.
  [[nodiscard]] double all_reduce(const CallLabel& label, double count, Exchange& exchange) {
    const std::span<double> message = std::span(numbers_).subspan(results_);
    const std::span<double> header = message.last(kHeaderSize);
    header[kCount] = count;
    exchange.all_reduce(label, message, Stream{});
    return header[kCount];
  }

 private:
  std::int64_t channels_;
  std::size_t results_;
  AlignedVector<double> numbers_;
};

// Gradient sums for all channels, in memory that this object owns.
class OwnedGradientSums {
 public:
  explicit OwnedGradientSums(std::int64_t channels)
      : channels_(channels), numbers_(static_cast<std::size_t>(2 * channels)) {}

  [[nodiscard]] GradientSums view() noexcept {
    return {numbers_.data(), numbers_.data() + channels_};
  }

 private:
  std::int64_t channels_;
  AlignedVector<double> numbers_;
};

// The buffers that one direction uses in device memory.
struct DeviceStep {
  // wanted: where the caller wants the coefficients; none: they go into the workspace.
  DeviceStep(const DeviceContext& context, const TensorView& x, std::int64_t slices,
             Coefficients wanted = {})
      : device(context),
        batches(norm_batches(x, slices)),
        scratch{context.scratch, x.channels, batches.slices},
        message{context.workspace, x.channels},
        coefficients(wanted) {
    if (wanted.data == nullptr) coefficients.data = context.workspace + message_size(x.channels);
  }

  // Calls sum(header, peers), which queues the kernel that sums: with peers, it exchanges the sums
  // and uses the totals. Otherwise (nullptr) it writes the message, which is then replaced by its
  // total over the ranks. Returns whether the totals are used already. `shared` becomes the norm
  // batch of the ranks, before sum() is called.
  template <class Sum>
  [[nodiscard]] bool sum_over_ranks(Exchange& exchange, const CallLabel& label, NormBatches& shared,
                                    const Sum& sum) const {
    shared = batches;
    shared.totals = message.header();
    shared.ranks = exchange.communicator().size();
    shared.report = device.report;
    bool is_used = false;
    exchange.all_reduce_on_device(label, static_cast<double>(batches.samples * batches.positions),
                                  message, device.stream, [&](const Exchange::DeviceMessage& own) {
                                    shared.call = own.call;
                                    is_used = own.peers != nullptr;
                                    sum(own.header, own.peers);
                                  });
    return is_used;
  }

  const DeviceContext& device;
  NormBatches batches;
  DeviceScratch scratch;
  MessageView message;
  Coefficients coefficients;
};

}  // namespace normscope
