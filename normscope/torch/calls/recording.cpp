// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/calls/recording.h"

#include "normscope/torch/groups/exchanges.h"
#include "normscope/torch/groups/registry.h"

namespace normscope::binding {

bool is_recorded_for_a_graph() { return is_in_mode(c10::impl::TorchDispatchModeKey::FUNCTIONAL); }

bool is_of_one_rank(const Scope& scope, const ScopedCall& call) {
  return scope.is_of_one_rank() || !has_peers(call.group_name);
}

bool exchanges_with_ranks(const Scope& scope, const ScopedCall& call) {
  return !scope.is_of_one_rank() && !call.group_name.empty();
}

bool is_left_to_torch(const ForwardOpArguments& op) {
  if (op.graph != "exported" || !is_recorded_for_a_graph()) return false;
  const Scope scope = parsed_scope(op.call.scope);
  if (exchanges_with_ranks(scope, op.call)) return false;
  // A graph with one call for each slice is only right for one number of samples.
  return scope.kind() != Scope::Kind::kSlices || !op.x.sym_size(0).is_symbolic();
}

std::vector<at::Tensor> keep_order(const std::vector<at::Tensor>& values) {
  static const auto op = op_named<std::vector<at::Tensor>(at::TensorList)>("normscope::keep_order");
  return op.call(values);
}

}  // namespace normscope::binding
