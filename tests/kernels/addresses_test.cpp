// SPDX-License-Identifier: Apache-2.0
//
// Equal bits wherever tensors start and whatever gaps they have, and nothing written but the
// outputs. Device kernels read a plane in packs of 16 bytes, and the elements before the first pack
// and after the last one singly.
#include <algorithm>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "normscope/kernels/kernels.h"
#include "tests/kernels/channel_run.h"
#include "tests/kernels/kernel_suite.h"
#include "tests/kernels/kernels_under_test.h"
#include "tests/kernels/tile_specification.h"
#include "tests/support/execution.h"

namespace normscope::testing {
namespace {

class KernelBitsAtAddresses : public KernelSuite {
 protected:
  // Packed tensors, and what the kernels make of them: as specified, if they promise equal bits.
  struct Packed {
    const Tensor x;
    const Tensor dy;
    const ChannelArray weight;
    const ChannelArray bias;
    KernelRun run;
    Tensor activated;  // ReLU(normalized x + dy)
  };

  static Packed packed(const Shape& shape) {
    const Tensor x = filled(shape, Inputs::kMeanOf1e3Deviations, Role::kX);
    const Tensor dy = filled(shape, Inputs::kCentred, Role::kDy);
    const ChannelArray weight = parameters(DType::kFloat32, shape.channels, 1.5);
    const ChannelArray bias = parameters(DType::kFloat32, shape.channels, 0.0);
    KernelRun run = run_kernels(kernels(), Execution{}, x, dy, weight, bias);
    for (std::int64_t c = 0; has_equal_bits() && c < shape.channels; ++c) {
      with_element_type(dtype(), [&]<class Element>(Element*) {
        ASSERT_NO_FATAL_FAILURE(expect_as_specified<Element>(x, dy, run, weight, bias, c)) << c;
      });
    }
    Tensor activated = tensor(shape);
    kernels().normalize({}, x.view(), run.statistics.view().read_only(),
                        {weight.view(), bias.view(), kRelu}, dy.view(), activated.view());
    return {x, dy, weight, bias, run, activated};
  }

  // The same for tensors at other addresses, each with gaps of its own.
  static void expect_same_bits(Packed& packed, const Gaps& of_x, const Gaps& of_dy,
                               const Gaps& of_y) {
    const Shape shape{packed.x.samples(), packed.x.channels(), packed.x.positions()};
    Tensor x = tensor(shape, of_x);
    Tensor dy = tensor(shape, of_dy);
    fill(x, Inputs::kMeanOf1e3Deviations, Role::kX);
    fill(dy, Inputs::kCentred, Role::kDy);
    const Tensor y = tensor(shape, of_y);
    Tensor activated = y;

    KernelRun run = run_kernels(kernels(), Execution{}, x, dy, packed.weight, packed.bias, y);
    kernels().normalize({}, x.view().read_only(), run.statistics.view().read_only(),
                        {packed.weight.view(), packed.bias.view(), kRelu}, dy.view().read_only(),
                        activated.view());

    expect_equal_runs(run, packed.run);
    activated.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
      ASSERT_EQ(activated.at(n, c, p), packed.activated.at(n, c, p));
    });
    for (const Tensor* written : {&run.y, &run.dx, &activated}) {
      EXPECT_TRUE(written->untouched_outside(written->view()));
    }
  }

  // The same if all tensors start `offset` elements later, or one of them, or if one has gaps.
  static void expect_same_bits_of_moved_tensors(Packed& packed, std::int64_t offset) {
    SCOPED_TRACE(::testing::Message() << "offset " << offset);
    const Gaps moved{.before = offset};
    const Gaps moved_elsewhere{.before = offset * 7 % 16};
    expect_same_bits(packed, moved, moved, moved);
    expect_same_bits(packed, moved, {}, {});
    expect_same_bits(packed, {}, moved, {});
    expect_same_bits(packed, {}, {}, moved);
    // Planes move, except the first ones of samples: those move by multiples of 16 elements.
    const std::int64_t rest = (16 - packed.x.channels()) * offset;
    expect_same_bits(packed, {.row = offset, .sample = rest}, {}, {});
    expect_same_bits(packed, {}, {.sample = offset}, {});
    expect_same_bits(packed, moved, moved_elsewhere, {.row = 1});
  }

 private:
  static bool has_equal_bits() {
    return std::ranges::count(kernels_with_equal_bits(), &kernels()) != 0;
  }

  static constexpr ActivationFunction kRelu{.kind = Activation::kRelu};
};

TEST_P(KernelBitsAtAddresses, OfFewOffsetsFollowTheSpecification) {
  Packed expected = packed({2, 3, 7 * 7});
  for (const std::int64_t offset : {1, 6}) {
    ASSERT_NO_FATAL_FAILURE(expect_same_bits_of_moved_tensors(expected, offset));
  }
}

TEST_P(KernelBitsAtAddresses, OfAllOffsetsAreTheSame) {
  for (const std::int64_t size : {7 * 7, 130}) {
    SCOPED_TRACE(size);
    Packed expected = packed({2, 3, size});
    for (std::int64_t offset = 1; offset < 16; ++offset) {
      ASSERT_NO_FATAL_FAILURE(expect_same_bits_of_moved_tensors(expected, offset));
    }
  }
}

TEST_P(KernelBitsAtAddresses, OfAllSizesAreTheSame) {
  std::vector<std::int64_t> sizes{33 * 33, 2048, 2049};
  for (std::int64_t size = 2; size <= 200; ++size) sizes.push_back(size);
  for (const std::int64_t size : sizes) {
    SCOPED_TRACE(size);
    Packed expected = packed({2, 3, size});
    const Gaps gaps{.before = size % 16, .row = size % 5, .sample = size % 3};

    ASSERT_NO_FATAL_FAILURE(expect_same_bits(expected, gaps, gaps, gaps));
  }
}

// Several tiles, and rows of channels. Those of whole vectors are written in another way if they
// are aligned.
TEST_P(KernelBitsAtAddresses, OfLargeTensorsAreTheSame) {
  for (const Shape& shape : {Shape{1, 2, 129 * 129}, {3, 13, 70}, {3, 96, 70}}) {
    Packed expected = packed(shape);
    for (const std::int64_t offset : {0, 1, 4}) {
      SCOPED_TRACE(::testing::Message() << shape.channels << " channels, offset " << offset);

      ASSERT_NO_FATAL_FAILURE(expect_same_bits(expected, {.before = 1, .row = offset, .sample = 7},
                                               {.before = offset, .row = 2, .sample = 1},
                                               {.before = offset, .row = offset % 4, .sample = 2}));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Available, KernelBitsAtAddresses, combinations_of(kernels_under_test()),
                         name_of_combination);

}  // namespace
}  // namespace normscope::testing
