// SPDX-License-Identifier: Apache-2.0
//
// How many instructions load and store the planes of channels-first tensors, which start anywhere
// between two multiples of 16 bytes.
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <vector>

#include <gtest/gtest.h>

#include "normscope/core/cache_lines.h"
#include "normscope/kernels/device_kernels.h"
#include "tests/kernels/cuda_on_host/backend.h"
#include "tests/kernels/kernels_under_test.h"
#include "tests/support/tensor.h"

namespace normscope::testing {
namespace {

constexpr std::int64_t kPlanes = 256;  // so many that no plane is shared by blocks

// Of the calls of a layer, per plane. Some planes share a warp, whose instructions may be for one
// of them only.
struct Instructions {
  double normalize_loads;
  double normalize_stores;
  double moments_loads;
  double input_gradient_loads;
  double input_gradient_stores;
  double gradient_sums_loads;

  bool operator==(const Instructions&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Instructions& all) {
  return out << all.normalize_loads << ", " << all.normalize_stores << ", " << all.moments_loads
             << ", " << all.input_gradient_loads << ", " << all.input_gradient_stores << ", "
             << all.gradient_sums_loads;
}

Instructions instructions_of(DType dtype, std::int64_t positions) {
  const DeviceKernels& kernels = device_kernels_under_test();
  const Tensor ones = [&] {
    Tensor x(dtype, Layout::kChannelsFirst, 1, kPlanes, positions);
    x.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) { x.set(n, c, p, 1.0); });
    return x;
  }();
  const TensorView x = ones.view();
  Tensor y = ones;
  const NormBatches batches = norm_batches(x, 1);
  std::vector<double> zeros(static_cast<std::size_t>(device_scratch_size(kPlanes, 1)));
  std::vector<double> statistics(3 * kPlanes);
  AlignedVector<double> memory(Coefficients::kInputGradient * kPlanes);
  const Coefficients coefficients{memory.data()};
  const DeviceScratch scratch{zeros.data(), kPlanes};

  const auto moments = cuda_on_host::memory_instructions([&] {
    kernels.moments({}, x, scratch,
                    {.batches = batches,
                     .eps = 1e-5,
                     .statistics = statistics.data(),
                     .coefficients = coefficients},
                    {});
  });
  const auto normalize = cuda_on_host::memory_instructions(
      [&] { kernels.normalize({}, x, batches, coefficients, {}, {}, y.view()); });
  const auto sums = cuda_on_host::memory_instructions([&] {
    kernels.gradient_sums(
        {}, x, x, scratch,
        {.batches = batches, .statistics = statistics.data(), .coefficients = coefficients}, {});
  });
  const auto gradient = cuda_on_host::memory_instructions(
      [&] { kernels.input_gradient({}, x, x, batches, coefficients, y.view()); });
  const auto per_plane = [](std::int64_t all) { return static_cast<double>(all) / kPlanes; };
  return {per_plane(normalize.loads), per_plane(normalize.stores), per_plane(moments.loads),
          per_plane(gradient.loads),  per_plane(gradient.stores),  per_plane(sums.loads)};
}

TEST(PlaneInstructions, AreAsDocumented) {
  struct Row {
    DType dtype;
    std::int64_t positions;
    Instructions expected;
  };
  for (const auto& [dtype, positions, expected] : {
           Row{DType::kFloat32, 7 * 7, {9, 2, 1, 15, 2, 2}},
           {DType::kFloat32, 14 * 14, {8, 2, 2, 13, 2, 4}},
           {DType::kFloat32, 33 * 33, {17, 10, 13, 31, 10, 22}},
           {DType::kFloat32, 129 * 129, {137, 131, 137, 271, 131, 274}},
           {DType::kBFloat16, 7 * 7, {9, 2, 0.5, 15, 2, 1}},
           {DType::kBFloat16, 14 * 14, {9, 2, 1.25, 15, 2, 2.5}},
           {DType::kBFloat16, 33 * 33, {13, 6, 6.5, 23, 6, 11}},
           {DType::kBFloat16, 129 * 129, {73, 66, 69.25, 143, 66, 138.5}},
       }) {
    EXPECT_EQ(instructions_of(dtype, positions), expected)
        << normscope::name_of(dtype) << ", " << positions << " positions";
  }
}

}  // namespace
}  // namespace normscope::testing
