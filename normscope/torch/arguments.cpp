// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/arguments.h"

#include <string>

#include "normscope/core/scope.h"
#include "normscope/torch/errors.h"
#include "normscope/torch/tensor_view.h"

namespace normscope::binding {
namespace {

// "2 or 3".
std::string alternatives(at::IntArrayRef numbers) {
  std::string text;
  for (const std::int64_t number : numbers) {
    text += (text.empty() ? "" : " or ") + std::to_string(number);
  }
  return text;
}

void check_dtype(const at::Tensor& x) {
  TORCH_CHECK(dtype_of(x), "x: expected float32, float64, bfloat16 or float16, got ",
              c10::toString(x.scalar_type()));
}

// `x` has the channels that the first of the parameters has.
void check_channels(const at::Tensor& x, std::string_view name,
                    const std::optional<at::Tensor>& parameter) {
  if (!parameter) return;
  TORCH_CHECK(parameter->dim() == 1, name, ": expected 1 dimension, got ", parameter->dim());
  TORCH_CHECK(parameter->sym_size(0) == x.sym_size(1), "x: expected ", parameter->sym_size(0),
              " channels (", name, " has ", parameter->sym_size(0), "), got ", x.sym_size(1));
}

void check_parameter(const at::Tensor& x, std::string_view name,
                     const std::optional<at::Tensor>& parameter) {
  if (!parameter) return;
  TORCH_CHECK(parameter->scalar_type() == at::kFloat || parameter->scalar_type() == x.scalar_type(),
              name, ": expected float32 or the dtype of x (", c10::toString(x.scalar_type()),
              "), got ", c10::toString(parameter->scalar_type()));
  TORCH_CHECK(parameter->device() == x.device(), name, ": expected the device of x (", x.device(),
              "), got ", parameter->device());
}

// What is written through a plain pointer.
void check_buffer(std::string_view name, const std::optional<at::Tensor>& buffer) {
  TORCH_CHECK(!buffer || buffer->is_contiguous(), name, ": expected a contiguous tensor");
}

void check_running_statistics(const ForwardOpArguments& arguments) {
  TORCH_CHECK(
      arguments.running_mean.has_value() == arguments.running_var.has_value(),
      "running_var: expected a tensor where running_mean is one, and none where it is none");
  check_buffer("running_mean", arguments.running_mean);
  check_buffer("running_var", arguments.running_var);
  const std::optional<at::Tensor>& tracked = arguments.num_batches_tracked;
  TORCH_CHECK(!tracked || tracked->scalar_type() == at::kLong,
              "num_batches_tracked: expected int64, got ",
              tracked ? c10::toString(tracked->scalar_type()) : "");
  TORCH_CHECK(!tracked || tracked->device() == arguments.x.device(),
              "num_batches_tracked: expected the device of x (", arguments.x.device(), "), got ",
              tracked ? tracked->device() : arguments.x.device());
  TORCH_CHECK(!tracked || tracked->sym_numel() == 1, "num_batches_tracked: expected 1 number, got ",
              tracked ? tracked->sym_numel() : 1);
}

void check_device(const at::Tensor& x, std::string_view name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device() == x.device(), name, ": expected the device of x (", x.device(),
              "), got ", tensor.device());
}

// What forward answers, and other ops read through a plain pointer.
void check_statistics(const at::Tensor& x, const at::Tensor& statistics) {
  TORCH_CHECK(statistics.scalar_type() == at::kDouble, "statistics: expected float64, got ",
              c10::toString(statistics.scalar_type()));
  TORCH_CHECK(statistics.dim() == 3 && statistics.sym_size(0) >= 1 && statistics.sym_size(1) == 3 &&
                  statistics.sym_size(2) == x.sym_size(1),
              "statistics: expected the shape [slices, 3, ", x.sym_size(1), "], got ",
              statistics.sym_sizes());
  TORCH_CHECK(statistics.is_contiguous(), "statistics: expected a contiguous tensor");
  check_device(x, "statistics", statistics);
}

void check_like_x(const at::Tensor& x, std::string_view name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.sym_sizes() == x.sym_sizes(), name, ": expected the shape of x, ",
              x.sym_sizes(), ", got ", tensor.sym_sizes());
  TORCH_CHECK(tensor.scalar_type() == x.scalar_type(), name, ": expected the dtype of x (",
              c10::toString(x.scalar_type()), "), got ", c10::toString(tensor.scalar_type()));
  check_device(x, name, tensor);
}

void check_parameter_of_channels(const at::Tensor& x, std::string_view name,
                                 const std::optional<at::Tensor>& parameter) {
  check_channels(x, name, parameter);
  check_parameter(x, name, parameter);
}

// The gradient of a parameter's gradient.
void check_parameter_gradient(const at::Tensor& x, std::string_view name,
                              const std::optional<at::Tensor>& gradient) {
  if (!gradient) return;
  check_channels(x, name, gradient);
  TORCH_CHECK(gradient->is_floating_point(), name, ": expected floating-point numbers, got ",
              c10::toString(gradient->scalar_type()));
  check_device(x, name, *gradient);
}

}  // namespace

std::int64_t slices_wanted(std::string_view text) {
  const Scope scope = as_torch([&] { return Scope::parse(text); });
  TORCH_CHECK_VALUE(scope.kind() != Scope::Kind::kNormBatch,
                    "scope: expected what the op resolve_scope makes of it, got ", text);
  return scope.kind() == Scope::Kind::kSlices ? scope.count() : 1;
}

SliceStats parse_slice_stats(std::string_view slice_stats) {
  if (slice_stats == "pooled") return SliceStats::kPooled;
  if (slice_stats == "first") return SliceStats::kFirst;
  if (slice_stats == "sequential") return SliceStats::kSequential;
  TORCH_CHECK_VALUE(false, "slice_stats: expected pooled, first or sequential, got \"", slice_stats,
                    "\"");
}

void check_dimensions(const at::Tensor& x, at::IntArrayRef dims) {
  TORCH_CHECK_VALUE(x.dim() >= 2, "x: expected at least 2 dimensions, got ", x.dim());
  bool matches = dims.empty();
  for (const std::int64_t wanted : dims) matches = matches || x.dim() == wanted;
  TORCH_CHECK_VALUE(matches, "x: expected ", alternatives(dims), " dimensions, got ", x.dim());
}

void check_arguments(const ForwardOpArguments& arguments) {
  const auto& [x, weight, bias, running_mean, running_var, num_batches_tracked, momentum, eps, dims,
               scope, slice_stats] = arguments;
  static_cast<void>(slices_wanted(scope));
  static_cast<void>(parse_slice_stats(slice_stats));
  TORCH_CHECK_VALUE(eps > 0, "eps: expected a positive number in training, got ", eps);
  check_dimensions(x, dims);
  check_dtype(x);
  const struct {
    std::string_view name;
    const std::optional<at::Tensor>& tensor;
  } parameters[] = {{"weight", weight},
                    {"bias", bias},
                    {"running_mean", running_mean},
                    {"running_var", running_var}};
  for (const auto& [name, tensor] : parameters) check_channels(x, name, tensor);
  for (const auto& [name, tensor] : parameters) check_parameter(x, name, tensor);
  check_running_statistics(arguments);
}

void check_arguments(const ApplyOpArguments& arguments) {
  const at::Tensor& x = arguments.x;
  check_dimensions(x, {});
  check_dtype(x);
  check_parameter_of_channels(x, "weight", arguments.weight);
  check_parameter_of_channels(x, "bias", arguments.bias);
  check_statistics(x, arguments.statistics);
}

void check_arguments(const BackwardOpArguments& arguments) {
  const at::Tensor& x = arguments.x;
  static_cast<void>(slices_wanted(arguments.scope));
  check_dimensions(x, {});
  check_dtype(x);
  check_like_x(x, "dy", arguments.dy);
  check_parameter_of_channels(x, "weight", arguments.weight);
  check_statistics(x, arguments.statistics);
}

void check_arguments(const DoubleBackwardOpArguments& arguments) {
  const at::Tensor& x = arguments.backward.x;
  check_arguments(arguments.backward);
  if (arguments.grad_dx) check_like_x(x, "grad_dx", *arguments.grad_dx);
  check_parameter_gradient(x, "grad_dweight", arguments.grad_dweight);
  check_parameter_gradient(x, "grad_dbias", arguments.grad_dbias);
}

void throw_one_value_per_channel(const at::Tensor& x) {
  TORCH_CHECK_VALUE(false, "Expected more than 1 value per channel when training, got input size ",
                    "torch.Size(", x.sym_sizes(), ")");
}

}  // namespace normscope::binding
