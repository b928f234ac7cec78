// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/tensors/results.h"

#include <cstddef>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "normscope/torch/tensors/tensor_view.h"

namespace normscope::binding {
namespace {

at::Tensor empty_parameter_gradient(const at::Tensor& x, const c10::SymInt& channels) {
  return at::empty_symint({channels}, arithmetic_options(x));
}

}  // namespace

at::TensorOptions arithmetic_options(const at::Tensor& x) {
  return x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

at::Tensor empty_coefficients(const at::Tensor& x, const c10::SymInt& slices,
                              std::int64_t numbers) {
  return at::empty_symint({slices, numbers, x.sym_size(1)}, arithmetic_options(x));
}

Gradients::Gradients(const at::Tensor& x, const WantedGradients& wanted)
    : dx(wanted.dx ? empty_output(x) : at::empty({0}, x.options())),
      dweight(empty_parameter_gradient(x, wanted.dweight ? x.sym_size(1) : 0)),
      dbias(empty_parameter_gradient(x, wanted.dbias ? x.sym_size(1) : 0)) {}

GradientTensors empty_second_gradients(const at::Tensor& x) {
  return {empty_output(x), empty_output(x), empty_parameter_gradient(x, x.sym_size(1))};
}

c10::SymInt elements_per_channel(const at::Tensor& x) {
  c10::SymInt count = x.sym_size(0);
  for (std::int64_t dim = 2; dim < x.dim(); ++dim) count = count * x.sym_size(dim);
  return count;
}

at::Tensor along_channels(const at::Tensor& x, const at::Tensor& values) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(x.dim()), 1);
  shape[1] = -1;
  return values.reshape(shape);
}

OptionalTensor copy_of(const OptionalTensor& buffer) {
  return buffer ? OptionalTensor(buffer->clone()) : std::nullopt;
}

at::Tensor or_empty(const OptionalTensor& buffer, const at::Tensor& x) {
  return buffer ? *buffer : at::empty({0}, x.options());
}

at::Tensor like_or_empty(const OptionalTensor& buffer, const at::Tensor& x) {
  return buffer ? at::empty_like(*buffer) : at::empty({0}, x.options());
}

void set_buffer(const OptionalTensor& buffer, const at::Tensor& value) {
  if (buffer) buffer->copy_(value);
}

}  // namespace normscope::binding
