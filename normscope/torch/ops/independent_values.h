// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

namespace normscope::binding {

// Ops of docs/numerics.md, "Independent values". Moments are float64 in host memory, in the rows of
// PartMoments: [batches, parts, 1 + 2 C].

// The moments of x [N, C, *], cut into parts: [1, parts, 1 + 2 C].
[[nodiscard]] at::Tensor part_moments_of(const at::Tensor& x, std::int64_t parts);

// The independent values of a norm batch of `ranks` parts: value, lower, upper, noisiest tenth.
// Empty if there are fewer than two such norm batches.
[[nodiscard]] std::vector<double> independent_values_of(const at::Tensor& moments,
                                                        std::int64_t ranks, double eps);

// Chooses the scope of a layer from the moments of its calls; their parts are the ranks. Returns
// the index of the chosen candidate, the candidates' scopes and ranks, and their independent values
// [candidates, 5]: value, lower, upper, noisiest tenth, and 1 if they are extrapolated. The values
// are NaN if there are none.
using ScopeChoiceFields =
    std::tuple<std::int64_t, std::vector<std::string>, std::vector<std::int64_t>, at::Tensor>;
[[nodiscard]] ScopeChoiceFields choose_scope_of(std::string_view layer, at::TensorList calls,
                                                double eps, double wanted,
                                                at::IntArrayRef host_of_rank);

}  // namespace normscope::binding
