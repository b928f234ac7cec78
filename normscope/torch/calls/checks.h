// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "normscope/core/activation.h"
#include "normscope/core/attributes.h"
#include "normscope/core/header.h"
#include "normscope/core/limbs.h"
#include "normscope/core/scope.h"
#include "normscope/kernels/kernels.h"
#include "normscope/torch/calls/arguments.h"

namespace normscope::binding {

// Argument checks that all backends share. They also work on tensors without storage, which shows a
// mistake while a graph is traced. Errors name the argument. Python sees a ValueError if torch's
// layers raise one, otherwise a RuntimeError.

// How a forward divides its batch.
struct Slicing {
  std::int64_t slices_wanted;  // 1 if the ranks of a group share statistics
  SliceStats slice_stats;

  [[nodiscard]] bool pools() const {
    return slices_wanted > 1 && slice_stats == SliceStats::kPooled;
  }
};
[[nodiscard]] Slicing checked(const ForwardOpArguments& op, const Scope& scope);

// The name of an activation, and the activation of a name.
[[nodiscard]] NORMSCOPE_EXPORT std::string_view name_of(Activation activation) noexcept;
[[nodiscard]] ActivationFunction parsed_activation(std::string_view name, double negative_slope);
// Checks the activation of a forward, and its residual.
[[nodiscard]] ActivationFunction checked(const ActivationCall& op, const at::Tensor& x);
// Checks the arguments of a backward, including its activation.
[[nodiscard]] ActivationFunction checked(const BackwardOpArguments& op);

// The size of a tensor of moments, or of gradient sums.
template <class Int>
[[nodiscard]] Int moments_size(const Int& channels) {
  return channels * Int(kSums * kLimbs) + Int(kHeaderSize);
}
void check_moments(const at::Tensor& x, std::string_view name, const at::Tensor& moments);
void check_running(const at::Tensor& x, const RunningTensors& running);
void check_weight(const at::Tensor& x, const OptionalTensor& weight);
// Check one part of a norm batch; in backward also dy and the statistics [1, 3, C].
void check_part(const at::Tensor& x);
void check_part(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& statistics);
// Checks that x has as many slices.
void check_slices(const at::Tensor& x, const at::Tensor& statistics);

NORMSCOPE_EXPORT void check_dimensions(const at::Tensor& x, at::IntArrayRef dims);
void check_arguments(const WithStatisticsOpArguments& op);
void check_arguments(const DoubleBackwardOpArguments& op);

// Throws torch's own error for one value per channel in x, with the name of the layer if there is
// one.
[[noreturn]] void throw_one_value_per_channel(const at::Tensor& x, std::string_view layer);
// The same for a norm batch of several ranks, each of which throws it.
[[noreturn]] void throw_one_value_per_channel(const ScopedCall& call);

}  // namespace normscope::binding
