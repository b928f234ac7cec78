// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "normscope/batch_norm/exchange.h"
#include "normscope/torch/calls/arguments.h"

namespace normscope::binding {

// Sets whether forwards check x for values that are not finite, backwards dy, and double backwards
// their gradient sums. Off unless NORMSCOPE_DETECT_NON_FINITE=1. Holds for the process, and must be
// the same on all ranks. Returns the previous setting.
bool set_detect_non_finite(bool wanted);

// Checks `tensor`, of any shape; does nothing if checks are off. Collective, with a message of its
// own. If values are not finite on some rank, throws c10::DistError on every rank of the exchange,
// which stays usable, and says on which rank. A rank alone (nullptr) throws c10::Error.
void check_finite(const at::Tensor& tensor, Exchange* exchange, Direction direction,
                  const ScopedCall& call);

}  // namespace normscope::binding
