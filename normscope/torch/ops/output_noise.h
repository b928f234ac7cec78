// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

namespace normscope::binding {

// Ops of docs/numerics.md, "Output noise". All numbers are float64 in host memory.

// The gradients of a random projection with respect to the outputs of a network, of their dtypes
// and devices, and the factor that turns a squared change of the projection into noise. If the
// outputs change a little, the expected noise, summed over the ranks, is the sum of the squares of
// the changes, each divided by the scale of its output; with several outputs, the mean of these
// sums over those with elements. The square of the scale is the sum of the squared differences
// between the elements of an output and the means of their channels; for a scalar, the difference
// is taken to be a tenth of its value. moments[i] are the rows of all ranks for outputs[i], without
// dz. This process has the shares of `parts` consecutive ranks from rank `first` on; outputs with
// several shares are cut along dimension 0. The signs depend on `batch` and rank alone.
//
// The factor is infinite if the outputs do not vary: if none has elements, or one that has some has
// no scale.
using Cotangents = std::tuple<std::vector<at::Tensor>, double>;
[[nodiscard]] Cotangents random_cotangents(at::TensorList outputs, at::TensorList moments,
                                           std::int64_t batch, std::int64_t first,
                                           std::int64_t parts);

// The sums over a part of a batch at a layer: x, and dz for the output of the normalization, both
// [N, C, *] or rows [n, C] of `samples` samples (none: N). Returns [2 + 4 C]: samples, elements per
// channel, means, variances, sums of dz, and sums of dz * (x - mean).
//
// Without dz, only the moments [2 + 2 C], also of an output of the network. All elements of a
// tensor with fewer than two dimensions, such as a loss, are of one sample and one channel.
[[nodiscard]] at::Tensor part_sums(const at::Tensor& x, const std::optional<at::Tensor>& dz,
                                   std::optional<std::int64_t> samples);

// The noise of the candidates (core/scope_choice.h) for one call of a layer: [candidates, 3] with
// the sum of the squared changes of the projection over the own parts, and samples and elements of
// the smallest norm batch. `own` [P, 2 + 4 C] are rows of part_sums(), of the ranks from `first`
// on; `moments` [R, 2 + 2 C] the beginnings of the rows of all ranks.
[[nodiscard]] at::Tensor output_noise(const at::Tensor& own, const at::Tensor& moments,
                                      std::int64_t first, const std::optional<at::Tensor>& weight,
                                      double eps, at::IntArrayRef host_of_rank);

// The numbers of core/scope_choice.h: the default noise, samples, elements, and updates.
[[nodiscard]] std::vector<double> limits_of_scopes();

// Chooses a candidate for each layer. noise[i] is [batches, candidates], sizes[i] [candidates, 2]
// samples and elements of the smallest norm batch. Returns the candidates' scopes, and how many
// ranks of each share statistics; the index of each layer's candidate; and mean and standard error
// of the total noise.
using ChoiceFields = std::tuple<std::vector<std::string>, std::vector<std::int64_t>,
                                std::vector<std::int64_t>, double, double>;
[[nodiscard]] ChoiceFields choose_scopes_of(at::IntArrayRef host_of_rank,
                                            const c10::List<std::string>& layers,
                                            at::IntArrayRef exchange_bytes,
                                            const c10::List<bool>& trained, at::TensorList noise,
                                            at::TensorList sizes, double allowed);

}  // namespace normscope::binding
