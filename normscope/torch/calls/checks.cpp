// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/calls/checks.h"

#include <algorithm>

#include <c10/util/StringUtil.h>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/torch/errors.h"
#include "normscope/torch/tensors/tensor_view.h"

namespace normscope::binding {
namespace {

void check_dtype(const at::Tensor& x) {
  TORCH_CHECK(dtype_of(x), "x: expected float32, float64, bfloat16 or float16, got ",
              dtype_name_of(x));
}

void check_device(const at::Tensor& x, std::string_view name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device() == x.device(), name, ": expected the device of x (", x.device(),
              "), got ", tensor.device());
}

// Checks that `x` has as many channels as the parameter.
void check_channels(const at::Tensor& x, std::string_view name, const OptionalTensor& parameter) {
  if (!parameter) return;
  TORCH_CHECK(parameter->dim() == 1, name, ": expected 1 dimension, got ", parameter->dim());
  TORCH_CHECK(parameter->sym_size(0) == x.sym_size(1), "x: expected ", parameter->sym_size(0),
              " channels (", name, " has ", parameter->sym_size(0), "), got ", x.sym_size(1));
}

void check_parameter(const at::Tensor& x, std::string_view name, const OptionalTensor& parameter) {
  if (!parameter) return;
  TORCH_CHECK(parameter->scalar_type() == at::kFloat || parameter->scalar_type() == x.scalar_type(),
              name, ": expected float32 or the dtype of x (", dtype_name_of(x), "), got ",
              dtype_name_of(*parameter));
  check_device(x, name, *parameter);
}

void check_like_x(const at::Tensor& x, std::string_view name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.sym_sizes() == x.sym_sizes(), name, ": expected the shape of x, ",
              x.sym_sizes(), ", got ", tensor.sym_sizes());
  TORCH_CHECK(tensor.scalar_type() == x.scalar_type(), name, ": expected the dtype of x (",
              dtype_name_of(x), "), got ", dtype_name_of(tensor));
  check_device(x, name, tensor);
}

void check_parameter_of_channels(const at::Tensor& x, std::string_view name,
                                 const OptionalTensor& parameter) {
  check_channels(x, name, parameter);
  check_parameter(x, name, parameter);
}

void check_float64(std::string_view name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.scalar_type() == at::kDouble, name, ": expected float64, got ",
              dtype_name_of(tensor));
}

// Checks statistics from forward, which other ops read through a plain pointer.
void check_statistics(const at::Tensor& x, const at::Tensor& statistics) {
  check_float64("statistics", statistics);
  TORCH_CHECK(statistics.dim() == 3 && statistics.sym_size(0) >= 1 && statistics.sym_size(1) == 3 &&
                  statistics.sym_size(2) == x.sym_size(1),
              "statistics: expected the shape [slices, 3, ", x.sym_size(1), "], got ",
              statistics.sym_sizes());
  TORCH_CHECK(statistics.is_contiguous(), "statistics: expected a contiguous tensor");
  check_device(x, "statistics", statistics);
}

// Checks the gradient of a parameter's gradient.
void check_parameter_gradient(const at::Tensor& x, std::string_view name,
                              const OptionalTensor& gradient) {
  if (!gradient) return;
  check_channels(x, name, gradient);
  TORCH_CHECK(gradient->is_floating_point(), name, ": expected floating-point numbers, got ",
              dtype_name_of(*gradient));
  check_device(x, name, *gradient);
}

// Checks a residual, or the y that replaces it in a backward.
void check_residual(const at::Tensor& x, std::string_view name, const at::Tensor& tensor,
                    const ActivationFunction& activation) {
  TORCH_CHECK_VALUE(activation.output_tells_gradient(), name,
                    ": expected none unless the activation is relu, relu6 or a leaky_relu with a "
                    "slope of at least 0, got one with ",
                    name_of(activation.kind));
  check_like_x(x, name, tensor);
}

constexpr struct {
  std::string_view name;
  Activation kind;
} kActivations[] = {{"none", Activation::kNone},   {"relu", Activation::kRelu},
                    {"relu6", Activation::kRelu6}, {"leaky_relu", Activation::kLeakyRelu},
                    {"silu", Activation::kSilu},   {"hard_swish", Activation::kHardSwish}};

SliceStats parsed_slice_stats(std::string_view text) {
  if (text == "pooled") return SliceStats::kPooled;
  if (text == "first") return SliceStats::kFirst;
  if (text == "sequential") return SliceStats::kSequential;
  TORCH_CHECK_VALUE(false, "slice_stats: expected pooled, first or sequential, got \"", text, "\"");
}

}  // namespace

std::string_view name_of(Activation activation) noexcept {
  for (const auto& known : kActivations) {
    if (known.kind == activation) return known.name;
  }
  return "unknown";
}

ActivationFunction parsed_activation(std::string_view name, double negative_slope) {
  for (const auto& known : kActivations) {
    if (known.name == name) return {known.kind, negative_slope};
  }
  TORCH_CHECK_VALUE(false, "activation: expected none, relu, relu6, leaky_relu, silu or ",
                    "hard_swish, got \"", name, "\"");
}

ActivationFunction checked(const ActivationCall& op, const at::Tensor& x) {
  const ActivationFunction activation = parsed_activation(op.activation, op.negative_slope);
  if (op.residual) check_residual(x, "residual", *op.residual, activation);
  return activation;
}

ActivationFunction checked(const BackwardOpArguments& op) {
  check_part(op.dy, op.x, op.statistics);
  check_weight(op.x, op.weight);
  const ActivationBackwardCall& after = op.activation;
  check_parameter_of_channels(op.x, "bias", after.bias);
  const ActivationFunction activation = parsed_activation(after.activation, after.negative_slope);
  if (after.y) check_residual(op.x, "y", *after.y, activation);
  return activation;
}

void check_dimensions(const at::Tensor& x, at::IntArrayRef dims) {
  TORCH_CHECK_VALUE(x.dim() >= 2, "x: expected at least 2 dimensions, got ", x.dim(),
                    x.sym_numel() == 0 ? " (an empty batch has the shape [0, channels])" : "");
  TORCH_CHECK_VALUE(dims.empty() || std::ranges::count(dims, x.dim()) > 0, "x: expected ",
                    c10::Join(" or ", dims), " dimensions, got ", x.dim());
}

Slicing checked(const ForwardOpArguments& op, const Scope& scope) {
  const SliceStats slice_stats = parsed_slice_stats(op.slice_stats);
  TORCH_CHECK_VALUE(op.eps > 0, "eps: expected a positive number in training, got ", op.eps);
  check_dimensions(op.x, op.dims);
  check_dtype(op.x);
  check_weight(op.x, op.weight);
  check_parameter_of_channels(op.x, "bias", op.bias);
  check_running(op.x, op.running);
  if (op.accumulated) check_moments(op.x, "accumulated", *op.accumulated);
  return {scope.kind() == Scope::Kind::kSlices ? scope.count() : 1, slice_stats};
}

void check_moments(const at::Tensor& x, std::string_view name, const at::Tensor& moments) {
  check_float64(name, moments);
  TORCH_CHECK(moments.dim() == 1 && moments.sym_size(0) == moments_size(x.sym_size(1)), name,
              ": expected the shape [", moments_size(x.sym_size(1)), "], got ",
              moments.sym_sizes());
  TORCH_CHECK(moments.is_contiguous(), name, ": expected a contiguous tensor");
  check_device(x, name, moments);
}

void check_running(const at::Tensor& x, const RunningTensors& running) {
  check_parameter_of_channels(x, "running_mean", running.mean);
  check_parameter_of_channels(x, "running_var", running.var);
  TORCH_CHECK(running.mean.has_value() == running.var.has_value(),
              "running_var: expected a tensor if running_mean is one, and none otherwise");
  if (!running.updates) return;
  check_device(x, "num_batches_tracked", *running.updates);
  TORCH_CHECK(running.updates->sym_numel() == 1, "num_batches_tracked: expected 1 number, got ",
              running.updates->sym_numel());
}

void check_weight(const at::Tensor& x, const OptionalTensor& weight) {
  check_parameter_of_channels(x, "weight", weight);
}

void check_part(const at::Tensor& x) {
  check_dimensions(x, {});
  check_dtype(x);
}

void check_part(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& statistics) {
  check_part(x);
  check_like_x(x, "dy", dy);
  check_statistics(x, statistics);
}

void check_slices(const at::Tensor& x, const at::Tensor& statistics) {
  const std::int64_t slices = statistics.size(0);
  TORCH_CHECK(slice_count(x.size(0), slices) == slices,
              "statistics: expected those of slices of x, got ", slices, " for ", x.size(0),
              " samples");
}

void check_arguments(const WithStatisticsOpArguments& op) {
  check_part(op.x);
  check_weight(op.x, op.weight);
  check_parameter_of_channels(op.x, "bias", op.bias);
  check_statistics(op.x, op.statistics);
  static_cast<void>(checked(op.activation, op.x));
}

void check_arguments(const DoubleBackwardOpArguments& op) {
  check_part(op.dy, op.x, op.statistics);
  check_weight(op.x, op.weight);
  if (op.grad_dx) check_like_x(op.x, "grad_dx", *op.grad_dx);
  check_parameter_gradient(op.x, "grad_dweight", op.grad_dweight);
  check_parameter_gradient(op.x, "grad_dbias", op.grad_dbias);
}

void throw_one_value_per_channel(const at::Tensor& x, std::string_view layer) {
  TORCH_CHECK_VALUE(false, "Expected more than 1 value per channel when training, got input size ",
                    "torch.Size(", x.sym_sizes(), ")", layer.empty() ? "" : " in ", layer);
}

void throw_one_value_per_channel(const ScopedCall& call) {
  TORCH_CHECK_VALUE(false, "Expected more than 1 value per channel when training, got 1 on all ",
                    "ranks together in ", call.layer.empty() ? "a layer" : call.layer,
                    " with scope ", call.scope);
}

}  // namespace normscope::binding
