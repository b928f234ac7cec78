// SPDX-License-Identifier: Apache-2.0
//
// Outputs are the same whether inputs are fetched or not. That is told by sizes which only large
// tensors have; here the sweeps themselves are asked for both.
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "normscope/core/aligned_vector.h"
#include "normscope/core/cache_line.h"
#include "normscope/core/element.h"
#include "normscope/core/tiles.h"
#include "normscope/kernels/cpu/pieces.h"
#include "tests/support/inputs.h"
#include "tests/support/tensor.h"

namespace normscope::testing {
namespace {

using cpu::Access;
using cpu::Loads;
using cpu::Pieces;
using cpu::Rows;
using cpu::Stores;

std::vector<const Pieces*> runnable_pieces() {
  std::vector<const Pieces*> all{&cpu::kBaseline};
#if defined(__x86_64__)
  for (const Pieces* pieces : {&cpu::kAvx2, &cpu::kAvx512}) {
    if (pieces->can_run()) all.push_back(pieces);
  }
#endif
  return all;
}

class Fetching : public ::testing::TestWithParam<const Pieces*> {};

TEST_P(Fetching, ChangesNoOutput) {
  struct Size {
    std::int64_t channels;
    std::int64_t positions;
    Rows rows;
  };
  // More than a run of short rows, a few or two at a time, of long ones, and of ones that are no
  // whole lines.
  for (const Size& size : {Size{96, 3001, Rows::kWholeLines}, Size{640, 451, Rows::kWholeLines},
                           Size{70, 4001, Rows::kAny}}) {
    for (const DType dtype :
         {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
      with_element_type(dtype, [&]<class Element>(Element*) {
        using Real = Arithmetic<Element>;
        const auto like_x = [&] {
          return Tensor(dtype, Layout::kChannelsLast, 1, size.channels, size.positions);
        };
        Tensor x = like_x();
        Tensor dy = like_x();
        x.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
          x.set(n, c, p, input_at(Inputs::kCentred, dtype, Role::kX, n, c, p));
          dy.set(n, c, p, input_at(Inputs::kCentred, dtype, Role::kDy, n, c, p));
        });
        const AlignedVector<Real> ones(static_cast<std::size_t>(size.channels), Real{1});
        const Real* const one = ones.data();
        const auto& sweeps = GetParam()->template of<Element>();
        const cpu::TileRange all{0, tiles_per_sample(Layout::kChannelsLast, size.positions)};
        const auto outputs_with = [&](Loads loads) {
          std::vector<Tensor> outputs{like_x(), like_x()};
          const Access access{loads, Stores::kCached};
          for (Tensor& output : outputs) {
            EXPECT_EQ(reinterpret_cast<std::uintptr_t>(output.view().data) % kCacheLine, 0);
          }
          sweeps.normalize(x.view().read_only(), {size.rows, one, one, one, one}, all, access,
                           outputs[0].view());
          sweeps.input_gradient(x.view().read_only(), dy.view().read_only(),
                                {size.rows, one, one, one, one, one}, all, access,
                                outputs[1].view());
          return outputs;
        };

        const std::vector<Tensor> cached = outputs_with(Loads::kCached);
        const std::vector<Tensor> fetched = outputs_with(Loads::kFetched);

        x.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
          ASSERT_EQ(fetched[0].at(n, c, p), cached[0].at(n, c, p));
          ASSERT_EQ(fetched[1].at(n, c, p), cached[1].at(n, c, p));
        });
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, Fetching, ::testing::ValuesIn(runnable_pieces()),
                         [](const auto& pieces) { return std::string(pieces.param->name); });

}  // namespace
}  // namespace normscope::testing
