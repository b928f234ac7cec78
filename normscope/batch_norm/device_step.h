// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "normscope/batch_norm/batch_norm.h"

namespace normscope {

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

  // Queues write_message(header), and then replaces the message by its total over the ranks.
  // Returns the norm batch that the ranks share.
  template <class WriteMessage>
  [[nodiscard]] NormBatches all_reduce(Exchange& exchange, const CallLabel& label,
                                       const WriteMessage& write_message) const {
    const auto own_count = static_cast<double>(batches.samples * batches.positions);
    const std::size_t size = static_cast<std::size_t>(limbs_size(message.channels) + kHeaderSize);
    NormBatches shared = batches;
    shared.call = exchange.all_reduce_on_device(label, own_count, {message.data, size},
                                                device.stream, write_message);
    shared.totals = message.header();
    shared.ranks = exchange.communicator().size();
    shared.report = device.report;
    return shared;
  }

  const DeviceContext& device;
  NormBatches batches;
  DeviceScratch scratch;
  MessageView message;
  Coefficients coefficients;
};

}  // namespace normscope
