// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "normscope/batch_norm/exchange.h"
#include "normscope/torch/operators.h"

namespace normscope::binding {

// Whether forwards look for values that are not finite in x, backwards in dy, and double backwards
// in what they send; off unless NORMSCOPE_DETECT_NON_FINITE=1. Of the process; all ranks must have
// the same. Returns what it was.
bool set_detect_non_finite(bool wanted);

// Throws c10::DistError on every rank of the exchange, which then goes on being usable, if `tensor`
// of any shape is not finite on one of them, and says on which; for a rank alone (nullptr)
// c10::Error. Collective, with a message of its own; nothing unless it is wanted.
void check_finite(const at::Tensor& tensor, Exchange* exchange, Direction direction,
                  const ScopedCall& call);

}  // namespace normscope::binding
