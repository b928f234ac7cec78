// SPDX-License-Identifier: Apache-2.0
//
// The same bits for any number of ranks, any assignment of samples, and any instruction set.
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "tests/batch_norm/activated_run.h"
#include "tests/batch_norm/layer_run.h"
#include "tests/comm/worlds.h"
#include "tests/kernels/kernels_under_test.h"

namespace normscope::testing {
namespace {

std::vector<Layer> layers() {
  return with_every_type({{.positions = 150},
                          {.positions = 150, .inputs = Inputs::kPaddedCorner},
                          {.positions = 1, .parameters = Parameters::kLikeInput}});
}

class EqualBits : public ::testing::TestWithParam<World> {};

TEST_P(EqualBits, ForAnyAssignmentOfSamplesAndInstructionSet) {
  const World& world = GetParam();
  // Before any rank starts.
  std::vector<LayerRun> expected;
  for (const Layer& layer : layers()) {
    expected.emplace_back(layer, first_samples(kSamples)).step({});
  }

  world.run(world.ranks, {}, [&](Communicator& communicator) {
    Exchange exchange = exchange_over(communicator);
    const auto rank = static_cast<std::size_t>(communicator.rank());
    for (const Kernels* kernels : kernels_with_equal_bits()) {
      for (const Assignment& assignment :
           {in_order(kSamples, world.ranks), uneven_and_permuted(kSamples, world.ranks)}) {
        for (std::size_t i = 0; i < expected.size(); ++i) {
          LayerRun run(layers()[i], assignment[rank]);
          CallContext context = context_of(&exchange);
          context.kernels = kernels;

          run.step(context);

          ASSERT_NO_FATAL_FAILURE(expect_equal_bits(run, expected[i]))
              << kernels->name << " layer " << i;
          expect_own_gradients(run, layers()[i], expected[i].statistics);
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Threads, EqualBits, worlds({1, 2, 3, 8}, run_as_threads), ranks_of);
INSTANTIATE_TEST_SUITE_P(Processes, EqualBits, worlds({3}, run_as_processes), ranks_of);

TEST(Activations, HaveTheBitsOfSingleOperations) {
  for (const Layer& layer : with_every_type({{.positions = 70}})) {
    for (const Activated& activated : activated_layers()) {
      ASSERT_NO_FATAL_FAILURE(expect_single_operations(layer, activated, first_samples(7), {}));
    }
  }
}

// A race needs time to show: each rank steps as fast as its peers let it.
class LongRun : public ::testing::TestWithParam<World> {};

TEST_P(LongRun, AThousandStepsOfRanksThatAreThreadsKeepTheBits) {
  const World& world = GetParam();
  const Layer layer{.channels = 3, .positions = 7};
  LayerRun expected(layer, first_samples(8));
  expected.step({});

  world.run(world.ranks, {}, [&](Communicator& communicator) {
    Exchange exchange = exchange_over(communicator);
    const auto rank = static_cast<std::size_t>(communicator.rank());
    for (int i = 0; i < 1000; ++i) {
      LayerRun run(layer, in_order(8, world.ranks)[rank]);

      run.step(context_of(&exchange));

      ASSERT_NO_FATAL_FAILURE(expect_equal_bits(run, expected)) << "step " << i;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Threads, LongRun, worlds({2, 4}, run_as_threads), ranks_of);

}  // namespace
}  // namespace normscope::testing
