// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "normscope/torch/calls/arguments.h"

namespace normscope::binding {

// The gradient of backward over one norm batch, in float64: docs/numerics.md, "Double backward".
// Uses plain tensor operations, because few networks differentiate twice.
class DoubleBackward {
 public:
  // The op's arguments for one norm batch; statistics: [3, C].
  explicit DoubleBackward(const DoubleBackwardOpArguments& arguments);

  // This rank's share of the norm batch: sums [k, C], and the number of elements per channel.
  [[nodiscard]] const at::Tensor& sums() const noexcept { return sums_; }
  [[nodiscard]] std::int64_t count() const;

  // The op's results; the last is the sum over this rank's samples. `means` are the totals of
  // sums(), divided by the total of count().
  [[nodiscard]] GradientTensors gradients(const at::Tensor& means) const;

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
