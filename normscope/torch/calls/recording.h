// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "normscope/core/scope.h"
#include "normscope/torch/calls/arguments.h"

namespace normscope::binding {

// Calls that a compiler or torch.export records for a graph. The argument `graph` of a forward
// selects how its elementwise part is recorded:
// * "fused": it is left to torch's ops, which a compiler fuses with others (docs/numerics.md,
//   "Compiled graphs", says what that may round differently).
// * "exact": it is one op with the bits of eager mode.
// * "exported": as "fused". But if no other rank shares the statistics, torch's batch norm replaces
//   the whole layer, so that the program can be used without this library.
// What follows "fused" or "exact" is the recorder of the op settings(), because torch keeps
// compiled graphs on disk and finds them by the calls of the layers.

// Whether ops that are called now are recorded for a functional graph, as by AOTAutograd.
[[nodiscard]] bool is_recorded_for_a_graph();

// Whether no other rank shares the statistics.
[[nodiscard]] bool is_of_one_rank(const Scope& scope, const ScopedCall& call);

// Whether other ranks may share the statistics, for a graph that may run in another program.
[[nodiscard]] bool exchanges_with_ranks(const Scope& scope, const ScopedCall& call);

// Whether torch's batch norm replaces the layer.
[[nodiscard]] bool is_left_to_torch(const ForwardOpArguments& op);

// Copies of `values` [...] that compilers compute in program order, among all such calls.
//
// Ranks must exchange in the same order, however a compiler reorders the graph. Every exchange is
// therefore between two calls of keep_order, which compilers keep in order and never repeat
// (ops.py declares them). That op takes only small tensors, because the arguments of such ops may
// come in any layout.
[[nodiscard]] std::vector<at::Tensor> keep_order(const std::vector<at::Tensor>& values);

}  // namespace normscope::binding
