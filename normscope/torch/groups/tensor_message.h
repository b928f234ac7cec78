// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

#include <ATen/core/Tensor.h>

#include "normscope/batch_norm/exchange.h"
#include "normscope/core/scope.h"
#include "normscope/torch/groups/exchanges.h"
#include "normscope/torch/tensors/op.h"

namespace normscope::binding {

// How a count of zero appears in a gathered row: torch's kernels divide by counts.
inline constexpr double kNoElements = 1e-30;

// Where the messages of a call go: to x's device if kernels of this library run there or if the
// group's backend takes its tensors; none: through the host.
[[nodiscard]] std::optional<Placement> placement_of_messages(const ScopedCall& call,
                                                             const at::Tensor& x);

// The rows of all ranks, in rank order.
struct GatheredRows {
  at::Tensor rows;    // [ranks, columns + kHeader]
  at::Tensor counts;  // [ranks] int32, elements per channel
};

// The message of a call whose statistics torch's kernels compute. If the group's backend works on
// x's device, the message is queued there and the host does not wait; a later call of the same
// ranks checks what they sent. Otherwise the message goes through the host, which waits for the
// device once.
class TensorMessage {
 public:
  // Numbers of a gathered row after the caller's own: the count, the call's hash and whether a
  // backward follows, and one that is unused.
  static constexpr std::int64_t kHeader = 4;

  explicit TensorMessage(const ExchangeUse& use) : use_(use) {}

  [[nodiscard]] const Scope& scope() const noexcept { return use_.scope(); }
  [[nodiscard]] const ExchangeUse& exchange() const noexcept { return use_; }
  [[nodiscard]] bool is_alone() const noexcept { return use_.get() == nullptr; }
  // At least 1.
  [[nodiscard]] std::int64_t ranks() const;

  // `own` is this rank's row without its header: parts [k] of one dtype, which are joined.
  // `count`: elements per channel. In a forward, one value per channel in the norm batch is a
  // OneValueError: in this call, or in a later one if the message stays on the device.
  [[nodiscard]] GatheredRows gather(const CallLabel& label, std::int64_t count,
                                    std::initializer_list<at::Tensor> own);

  // The sums over the ranks of parts [k] of one dtype, which are joined, followed by the sum of
  // `count` [1].
  [[nodiscard]] at::Tensor sum(const CallLabel& label, std::int64_t count,
                               std::initializer_list<at::Tensor> own);

 private:
  [[nodiscard]] bool is_on_device() const;
  [[nodiscard]] at::Tensor gather_through_host(const CallLabel& label, std::int64_t count,
                                               const at::Tensor& own);
  [[nodiscard]] at::Tensor sum_on_device(const CallLabel& label, std::int64_t count,
                                         std::initializer_list<at::Tensor> own);
  // Checks the headers [kHeader, ranks] of all rows in a later call.
  void check_rows_later(const at::Tensor& headers, int call, std::int32_t hash);

  const ExchangeUse& use_;
};

}  // namespace normscope::binding
