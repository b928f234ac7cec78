// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include "normscope/torch/tensors/op.h"

namespace normscope::binding {

// The tensors that the ops return, not filled in yet. They are the same on all devices and on Meta,
// which has no storage.

// The options of tensors in the type of x's arithmetic.
[[nodiscard]] at::TensorOptions arithmetic_options(const at::Tensor& x);

// Coefficients [slices, numbers, C], in the type of x's arithmetic.
[[nodiscard]] at::Tensor empty_coefficients(const at::Tensor& x, const c10::SymInt& slices,
                                            std::int64_t numbers);

using GradientTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

struct WantedGradients {
  bool dx;
  bool dweight;
  bool dbias;
};

// The results of backward; gradients that are not wanted are empty tensors. Gradients of parameters
// are float32, or float64 for float64 inputs; autograd rounds them to the parameter's type.
struct Gradients {
  Gradients() = default;
  Gradients(const at::Tensor& x, const WantedGradients& wanted);

  [[nodiscard]] GradientTensors tensors() const { return {dx, dweight, dbias}; }

  at::Tensor dx;       // [N, C, *]
  at::Tensor dweight;  // [C]
  at::Tensor dbias;    // [C]
};

// The results of double backward.
[[nodiscard]] GradientTensors empty_second_gradients(const at::Tensor& x);

// The elements per channel of x [N, C, *].
[[nodiscard]] c10::SymInt elements_per_channel(const at::Tensor& x);

// values [C], in a shape that broadcasts over x [N, C, *].
[[nodiscard]] at::Tensor along_channels(const at::Tensor& x, const at::Tensor& values);

// Buffers that may be absent, for ops that return their new values: a copy, the buffer or an empty
// tensor, and an uninitialized tensor like it or an empty one.
[[nodiscard]] OptionalTensor copy_of(const OptionalTensor& buffer);
[[nodiscard]] at::Tensor or_empty(const OptionalTensor& buffer, const at::Tensor& x);
[[nodiscard]] at::Tensor like_or_empty(const OptionalTensor& buffer, const at::Tensor& x);
// Writes such a value into the buffer, if there is one.
void set_buffer(const OptionalTensor& buffer, const at::Tensor& value);

}  // namespace normscope::binding
