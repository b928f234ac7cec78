// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/calls/finite.h"

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/ops/isfinite.h>
#include <c10/util/Exception.h>

#include "normscope/comm/calls.h"
#include "normscope/core/environment.h"
#include "normscope/torch/errors.h"

namespace normscope::binding {
namespace {

std::atomic<bool>& is_wanted() {
  static std::atomic<bool> wanted = detects_non_finite();
  return wanted;
}

// The name in errors of the tensor that check_finite() checks.
std::string_view looked_at(Direction direction) {
  switch (direction) {
    case Direction::kForward: return "x";
    case Direction::kDoubleBackward: return "gradient sums";
    default: return "dy";
  }
}

std::int64_t non_finite_values(const at::Tensor& tensor) {
  return tensor.numel() - at::isfinite(tensor).sum().item<std::int64_t>();
}

// The numbers of all ranks. The label's layer makes these calls differ from those of ranks that do
// not check.
std::vector<double> counts_of_ranks(Exchange& exchange, std::int64_t own, Direction direction,
                                    const ScopedCall& call) {
  const std::string name = std::string(call.layer) + ", looking for non-finite values";
  return as_torch([&] {
    return exchange.gather({.layer = name, .scope = call.scope, .direction = direction},
                           {static_cast<double>(own)});
  });
}

}  // namespace

bool set_detect_non_finite(bool wanted) { return is_wanted().exchange(wanted); }

void check_finite(const at::Tensor& tensor, Exchange* exchange, Direction direction,
                  const ScopedCall& call) {
  if (!is_wanted().load(std::memory_order_relaxed)) return;
  const std::int64_t own = non_finite_values(tensor);
  std::string text(looked_at(direction));
  text += ": expected finite values in " + std::string(name_of(direction)) + " of ";
  text += text_of_layer(call.layer) + ", got ";
  if (exchange == nullptr) {
    TORCH_CHECK(own == 0, text, own, " non-finite");
    return;
  }
  const std::vector<double> of_ranks = counts_of_ranks(*exchange, own, direction, call);
  std::string found;
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
    if (of_ranks[rank] == 0) continue;
    found += found.empty() ? "" : ", ";
    found += std::to_string(static_cast<std::int64_t>(of_ranks[rank])) + " non-finite on rank " +
             std::to_string(exchange->name_of_rank(rank));
  }
  if (!found.empty()) C10_THROW_ERROR(DistError, text + found);
}

}  // namespace normscope::binding
