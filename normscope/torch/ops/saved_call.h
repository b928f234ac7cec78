// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <torch/csrc/autograd/custom_function.h>

#include "normscope/torch/groups/exchanges.h"
#include "normscope/torch/ops/operators.h"

namespace normscope::binding {

[[nodiscard]] inline bool requires_grad(const OptionalTensor& tensor) {
  return tensor && tensor->requires_grad();
}

// A call's group, layer and flags, which its backward or double backward needs. They are saved as
// one text and one number, because each entry of the map saved_data costs time in every forward.
inline constexpr char kSeparator = '\0';

// Neither scopes nor the names of groups contain separators.
inline void save(::torch::autograd::AutogradContext* context, const ScopedCall& call) {
  std::string text(call.scope);
  text.append(1, kSeparator).append(call.group_name).append(1, kSeparator).append(call.layer);
  context->saved_data["call"] = std::move(text);
}

// Returns views of a text that the context keeps.
[[nodiscard]] inline ScopedCall call_saved_in(const ::torch::autograd::AutogradContext& context) {
  const std::string_view text = context.saved_data.at("call").toStringView();
  const std::size_t first = text.find(kSeparator);
  const std::size_t second = text.find(kSeparator, first + 1);
  return {text.substr(0, first), text.substr(first + 1, second - first - 1),
          text.substr(second + 1)};
}

// For a backward that can be differentiated once more: what the op needs then, and the gradients of
// dy, x, weight and a further argument that has none.
inline void save_for_double_backward(::torch::autograd::AutogradContext* context,
                                     const at::Tensor& dy, const at::Tensor& x,
                                     const OptionalTensor& weight, const at::Tensor& statistics,
                                     const ScopedCall& call) {
  context->save_for_backward({dy, x, weight.value_or(at::Tensor()), statistics});
  context->set_materialize_grads(false);
  save(context, call);
}

[[nodiscard]] inline ::torch::autograd::variable_list double_backward_of(
    const ::torch::autograd::AutogradContext& context,
    const ::torch::autograd::variable_list& gradients) {
  const ScopedCall call = call_saved_in(context);
  return or_tell_peers(call, [&]() -> ::torch::autograd::variable_list {
    const ::torch::autograd::variable_list saved = context.get_saved_variables();
    const OptionalTensor grad_dx = defined_or_none(gradients[0]);
    const OptionalTensor grad_dweight = defined_or_none(gradients[1]);
    const OptionalTensor grad_dbias = defined_or_none(gradients[2]);
    const OptionalTensor weight = defined_or_none(saved[2]);
    const DoubleBackwardOpArguments op{grad_dx,  grad_dweight, grad_dbias, saved[0],
                                       saved[1], weight,       saved[3],   call};
    const auto [grad_dy, grad_x, grad_weight] = op.pass_to(double_backward_op());
    return {grad_dy, grad_x, weight ? grad_weight : at::Tensor(), at::Tensor()};
  });
}

inline constexpr std::int64_t kWantsDx = 1;
inline constexpr std::int64_t kWantsDWeight = 2;
inline constexpr std::int64_t kWantsDBias = 4;
inline constexpr std::int64_t kWantsDResidual = 8;
inline constexpr std::int64_t kDecomposes = 16;

// Saves which gradients the forward's backward must return.
inline void save_flags(::torch::autograd::AutogradContext* context, const at::Tensor& x,
                       const OptionalTensor& weight, const OptionalTensor& bias,
                       std::int64_t others) {
  context->saved_data["flags"] = (x.requires_grad() ? kWantsDx : 0) |
                                 (requires_grad(weight) ? kWantsDWeight : 0) |
                                 (requires_grad(bias) ? kWantsDBias : 0) | others;
}

[[nodiscard]] inline std::int64_t flags_saved_in(
    const ::torch::autograd::AutogradContext& context) {
  return context.saved_data.at("flags").toInt();
}

[[nodiscard]] inline WantedGradients wanted_by(std::int64_t flags) {
  return {(flags & kWantsDx) != 0, (flags & kWantsDWeight) != 0, (flags & kWantsDBias) != 0};
}

}  // namespace normscope::binding
