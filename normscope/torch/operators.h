// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace normscope::binding {

// The C++ types of the ops that operators.cpp declares.
using OptionalTensor = std::optional<at::Tensor>;

using BatchNormOp = at::Tensor(const at::Tensor& x, const OptionalTensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& running_mean,
                               const OptionalTensor& running_var,
                               const OptionalTensor& num_batches_tracked, bool training,
                               std::optional<double> momentum, double eps, at::IntArrayRef dims,
                               std::string_view scope, std::string_view slice_stats,
                               std::string_view group_name, std::string_view layer);

using ResolveScopeOp = std::string(std::string_view scope, std::string_view group_name,
                                   std::int64_t samples);

using ForwardOp = std::tuple<at::Tensor, at::Tensor>(
    const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& running_mean, const OptionalTensor& running_var,
    const OptionalTensor& num_batches_tracked, std::optional<double> momentum, double eps,
    at::IntArrayRef dims, std::string_view scope, std::string_view slice_stats, bool needs_backward,
    std::string_view group_name, std::string_view layer);

using BackwardOp = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& weight,
    const at::Tensor& statistics, bool wants_dx, bool wants_dweight, bool wants_dbias,
    std::string_view scope, std::string_view group_name, std::string_view layer);

using DoubleBackwardOp = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
    const OptionalTensor& grad_dx, const OptionalTensor& grad_dweight,
    const OptionalTensor& grad_dbias, const at::Tensor& dy, const at::Tensor& x,
    const OptionalTensor& weight, const at::Tensor& statistics, std::string_view scope,
    std::string_view group_name, std::string_view layer);

using MakeProcessGroupOp = std::string(std::string_view name, std::string_view parent,
                                       at::IntArrayRef ranks, double seconds);

using CloseProcessGroupOp = void(std::string_view name);

using CheckSignalsOp = void();

// The op that the dispatcher knows by this name, as operators.cpp declares it.
template <class Op>
[[nodiscard]] c10::TypedOperatorHandle<Op> op_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Op>();
}

[[nodiscard]] inline OptionalTensor defined_or_none(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

}  // namespace normscope::binding
