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

  // Queues what finalizes from the totals of the ranks, whose norm batch is `shared`. In one
  // kernel, which exchange_sums(shared, header, peers) queues, if the ranks' devices can write to
  // each other's memory; otherwise write_message(header), the sum over the ranks, and
  // use_totals(shared).
  template <class ExchangeSums, class WriteMessage, class UseTotals>
  void run_with_ranks(Exchange& exchange, const CallLabel& label, const ExchangeSums& exchange_sums,
                      const WriteMessage& write_message, const UseTotals& use_totals) const {
    NormBatches shared = batches;
    shared.totals = message.header();
    shared.ranks = exchange.communicator().size();
    shared.report = device.report;
    bool is_used = false;
    exchange.all_reduce_on_device(label, static_cast<double>(batches.samples * batches.positions),
                                  message, device.stream, [&](const Exchange::DeviceMessage& own) {
                                    shared.call = own.call;
                                    is_used = own.peers != nullptr;
                                    if (is_used) {
                                      exchange_sums(shared, own.header, *own.peers);
                                    } else {
                                      write_message(own.header);
                                    }
                                  });
    if (!is_used) use_totals(shared);
  }

  const DeviceContext& device;
  NormBatches batches;
  DeviceScratch scratch;
  MessageView message;
  Coefficients coefficients;
};

}  // namespace normscope
