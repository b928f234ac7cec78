// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "normscope/batch_norm/batch_norm.h"

namespace normscope::binding {

// What the ops are given, as the dispatcher hands it over. Backends check it alike, tensors without
// storage among them, so that a mistake shows while a graph is traced.
struct ForwardOpArguments {
  const at::Tensor& x;                                   // [N, C, *]
  const std::optional<at::Tensor>& weight;               // [C]
  const std::optional<at::Tensor>& bias;                 // [C]
  const std::optional<at::Tensor>& running_mean;         // [C]
  const std::optional<at::Tensor>& running_var;          // [C]
  const std::optional<at::Tensor>& num_batches_tracked;  // [] int64
  std::optional<double> momentum;                        // none: cumulative average
  double eps;
  at::IntArrayRef dims;  // the numbers of dimensions that x may have; none: any from 2
  std::string_view scope;
  std::string_view slice_stats;
};

struct ApplyOpArguments {
  const at::Tensor& x;                      // [N, C, *]
  const std::optional<at::Tensor>& weight;  // [C]
  const std::optional<at::Tensor>& bias;    // [C]
  const at::Tensor& statistics;             // [slices, 3, C] float64
};

struct BackwardOpArguments {
  const at::Tensor& dy;                     // [N, C, *]
  const at::Tensor& x;                      // [N, C, *]
  const std::optional<at::Tensor>& weight;  // [C]
  const at::Tensor& statistics;             // [slices, 3, C] float64
  std::string_view scope;
};

struct DoubleBackwardOpArguments {
  const std::optional<at::Tensor>& grad_dx;       // [N, C, *]
  const std::optional<at::Tensor>& grad_dweight;  // [C]
  const std::optional<at::Tensor>& grad_dbias;    // [C]
  BackwardOpArguments backward;
};

// Both throw what Python shows as ValueError, naming the argument. The number of slices that a
// scope wants in each rank's batch: 1 where the ranks of a group share statistics.
[[nodiscard]] std::int64_t slices_wanted(std::string_view text);
[[nodiscard]] SliceStats parse_slice_stats(std::string_view slice_stats);

// Throws what Python shows as ValueError where torch's layers raise one, else as RuntimeError.
void check_dimensions(const at::Tensor& x, at::IntArrayRef dims);
void check_arguments(const ForwardOpArguments& arguments);
void check_arguments(const ApplyOpArguments& arguments);
void check_arguments(const BackwardOpArguments& arguments);
void check_arguments(const DoubleBackwardOpArguments& arguments);

// torch's error where a norm batch has one value per channel.
[[noreturn]] void throw_one_value_per_channel(const at::Tensor& x);

}  // namespace normscope::binding
