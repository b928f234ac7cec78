// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include "normscope/core/attributes.h"
#include "normscope/torch/tensors/op.h"

namespace normscope::binding {

// What recommend_scopes computes, docs/numerics.md, "Output noise"; ops, except for the types of
// their errors. All numbers are float64 in host memory. The functions with a group_name are
// collective over the group.
//
// A process has the shares of each batch of `parts` consecutive ranks from rank `first` on: with
// several parts, all shares. host_of_rank [ranks] holds any number that is the same for all ranks
// of a host.

// The gradients of a random projection with respect to the outputs of a network, of their dtypes
// and devices, and the factor that turns a squared change of the projection into noise. If the
// outputs change a little, the expected noise, summed over the ranks, is the sum of the squares of
// the changes, each divided by the scale of its output; with several outputs, the mean of these
// sums over those with elements. The square of the scale is the sum of the squared differences
// between the elements of an output and the means of their channels; for a scalar, the difference
// is taken to be a tenth of its value. Outputs with several shares are cut along dimension 0. The
// signs depend on `batch` and rank alone.
//
// The factor is infinite if the outputs do not vary: if none has elements, or one that has some has
// no scale.
using Cotangents = std::tuple<std::vector<at::Tensor>, double>;
[[nodiscard]] NORMSCOPE_EXPORT Cotangents random_cotangents(at::TensorList outputs,
                                                            std::int64_t batch,
                                                            std::string_view group_name,
                                                            std::int64_t first, std::int64_t parts);

// The noise of the candidates (core/scope_choice.h) for one call of a layer, which errors call
// `layer`: [candidates, 3] with the noise of the own shares, and samples and elements of the
// smallest norm batch. x is [N, C, *]; dz, of the same shape, the gradient of the projection with
// respect to the output of the normalization, none for zeros; mask [N, 1, *], bool, is true where x
// counts. `to_noise` is the factor of random_cotangents(), infinity if the noise is unknown.
[[nodiscard]] NORMSCOPE_EXPORT at::Tensor output_noise(
    const at::Tensor& x, const OptionalTensor& dz, const OptionalTensor& mask,
    const OptionalTensor& weight, double eps, double to_noise, std::string_view layer,
    std::string_view group_name, std::int64_t first, std::int64_t parts,
    at::IntArrayRef host_of_rank);

// Chooses a candidate for each layer by its noise in all ranks. noise[i] is [batches that reached
// the layer, candidates, 3], of output_noise(), where the noise of a batch's calls is added up;
// there is none in the rest of `batches`. updates[i] are those of the running statistics, infinity
// if there are none; seconds[i] is the mean time of an exchange.
//
// Returns the candidates' scopes, and how many ranks of each share statistics; for each layer
// [candidates, 3] with the mean noise, samples and elements, the fewest updates, the mean seconds,
// and the index of its candidate; and mean and standard error of the total noise.
using ScopeChoice =
    std::tuple<std::vector<std::string>, std::vector<std::int64_t>, std::vector<at::Tensor>,
               std::vector<double>, std::vector<double>, std::vector<std::int64_t>, double, double>;
[[nodiscard]] NORMSCOPE_EXPORT ScopeChoice
choose_scopes_of(const c10::List<std::string>& layers, at::IntArrayRef exchange_bytes,
                 at::ArrayRef<double> updates, at::ArrayRef<double> seconds, at::TensorList noise,
                 std::int64_t batches, double allowed, std::string_view group_name,
                 at::IntArrayRef host_of_rank);

}  // namespace normscope::binding
