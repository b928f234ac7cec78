// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "normscope/core/activation.h"
#include "normscope/core/export.h"
#include "normscope/core/header.h"
#include "normscope/core/limbs.h"
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

// Numbers of a tensor of moments, or of sums, for so many channels.
template <class Int>
[[nodiscard]] Int moments_size(const Int& channels) {
  return channels * Int(kSums * kLimbs) + Int(kHeaderSize);
}
void check_moments(const at::Tensor& x, std::string_view name, const at::Tensor& moments);
void check_running(const at::Tensor& x, const OptionalTensor& running_mean,
                   const OptionalTensor& running_var, const OptionalTensor& num_batches_tracked);
void check_weight(const at::Tensor& x, const OptionalTensor& weight);
// Of one part of a norm batch; dy and statistics [1, 3, C] in backward.
void check_part(const at::Tensor& x);
void check_part(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& statistics);

void check_dimensions(const at::Tensor& x, at::IntArrayRef dims);
void check_arguments(const WithStatisticsOpArguments& op);
void check_arguments(const BackwardOpArguments& op);
void check_arguments(const DoubleBackwardOpArguments& op);

// torch's error where a norm batch has one value per channel.
[[noreturn]] void throw_one_value_per_channel(const at::Tensor& x);

}  // namespace normscope::binding
