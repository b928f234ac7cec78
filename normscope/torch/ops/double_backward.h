// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <tuple>

#include <ATen/core/Tensor.h>

#include "normscope/torch/ops/operators.h"

namespace normscope::binding {

// The inputs of the double backward op, for one norm batch.
struct DoubleBackwardArguments {
  OptionalTensor grad_dx;       // [N, C, *]; none: zeros
  OptionalTensor grad_dweight;  // [C]; none: zeros
  OptionalTensor grad_dbias;    // [C]; none: zeros
  at::Tensor dy;                // [N, C, *]
  at::Tensor x;                 // [N, C, *]
  OptionalTensor weight;        // [C]; none: ones
  at::Tensor statistics;        // [3, C], from forward
};

struct SecondGradients {
  at::Tensor dy;      // [N, C, *]
  at::Tensor x;       // [N, C, *]
  at::Tensor weight;  // [C], over this rank's samples
};

// The gradient of backward over one norm batch, in float64: docs/numerics.md, "Double backward".
// Uses plain tensor operations, because few networks differentiate twice.
class DoubleBackward {
 public:
  explicit DoubleBackward(const DoubleBackwardArguments& arguments);

  // This rank's share of the norm batch: sums [k, C], and the number of elements per channel.
  [[nodiscard]] const at::Tensor& sums() const noexcept { return sums_; }
  [[nodiscard]] std::int64_t count() const;

  // `means` are the totals of sums(), divided by the total of count().
  [[nodiscard]] SecondGradients gradients(const at::Tensor& means) const;

 private:
  [[nodiscard]] at::Tensor local_sums() const;
  [[nodiscard]] at::Tensor per_channel(const at::Tensor& tensor) const;

  at::Tensor x_;        // [N, C, *]
  at::Tensor dy_;       // [N, C, *]
  at::Tensor xhat_;     // [N, C, *]
  at::Tensor a_;        // [N, C, *] gradient with respect to dx
  at::Tensor b_;        // [1, C, 1...] gradient with respect to dweight
  at::Tensor c_;        // [1, C, 1...] gradient with respect to dbias
  at::Tensor weight_;   // [1, C, 1...]
  at::Tensor inv_std_;  // [1, C, 1...]
  at::Tensor sums_;
};

}  // namespace normscope::binding
