// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "normscope/kernels/kernels.h"
#include "tests/support/inputs.h"
#include "tests/support/tensor.h"

namespace normscope::testing {

using KernelCombination = std::tuple<const Kernels*, DType, Layout>;

[[nodiscard]] inline std::string name_of_combination(
    const ::testing::TestParamInfo<KernelCombination>& combination) {
  const auto& [kernels, dtype, layout] = combination.param;
  return std::string(kernels->name) + "_" + std::string(normscope::name_of(dtype)) + "_" +
         name_of(layout);
}

// `kernels` with every dtype and layout.
[[nodiscard]] inline auto combinations_of(const std::vector<const Kernels*>& kernels) {
  return ::testing::Combine(::testing::ValuesIn(kernels), ::testing::ValuesIn(kAllDTypes),
                            ::testing::ValuesIn(kAllLayouts));
}

// A suite that runs for every backend, dtype and layout.
class KernelSuite : public ::testing::TestWithParam<KernelCombination> {
 protected:
  [[nodiscard]] static const Kernels& kernels() { return *std::get<0>(GetParam()); }
  [[nodiscard]] static DType dtype() { return std::get<1>(GetParam()); }
  [[nodiscard]] static Layout layout() { return std::get<2>(GetParam()); }

  [[nodiscard]] static Tensor tensor(const Shape& shape, Gaps gaps = {}) {
    return {dtype(), layout(), shape.samples, shape.channels, shape.positions, gaps};
  }
  [[nodiscard]] static Tensor filled(const Shape& shape, Inputs inputs, Role role) {
    Tensor x = tensor(shape);
    fill(x, inputs, role);
    return x;
  }
};

}  // namespace normscope::testing
