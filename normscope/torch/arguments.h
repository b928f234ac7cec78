// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "normscope/core/activation.h"
#include "normscope/core/export.h"
#include "normscope/core/scope.h"
#include "normscope/kernels/kernels.h"
#include "normscope/torch/operators.h"

namespace normscope::binding {

// Backends check what the ops are given alike, that of tensors without storage among them, so that
// a mistake shows while a graph is traced. What follows throws what Python shows as ValueError
// where torch's layers raise one, else as RuntimeError, naming the argument.

// A scope that a call can run with: norm_batch:M has been resolved.
[[nodiscard]] Scope parsed_scope(std::string_view text);

// How a forward divides its batch.
struct Slicing {
  std::int64_t slices_wanted;  // 1 where the ranks of a group share statistics
  SliceStats slice_stats;
};
[[nodiscard]] Slicing checked(const ForwardOpArguments& op, const Scope& scope);

// An activation's name, and the activation of a name.
[[nodiscard]] NORMSCOPE_EXPORT std::string_view name_of(Activation activation) noexcept;
[[nodiscard]] ActivationFunction parsed_activation(std::string_view name, double negative_slope);
// That of a forward, whose residual is checked.
[[nodiscard]] ActivationFunction checked(const ActivationCall& op, const at::Tensor& x);
// That of a backward, whose bias and y are checked.
[[nodiscard]] ActivationFunction checked(const ActivatedBackwardOpArguments& op);

void check_dimensions(const at::Tensor& x, at::IntArrayRef dims);
void check_arguments(const WithStatisticsOpArguments& op);
void check_arguments(const BackwardOpArguments& op);
void check_arguments(const DoubleBackwardOpArguments& op);

// torch's error where a norm batch has one value per channel.
[[noreturn]] void throw_one_value_per_channel(const at::Tensor& x);

}  // namespace normscope::binding
