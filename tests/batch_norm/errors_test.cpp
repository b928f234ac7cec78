// SPDX-License-Identifier: Apache-2.0
//
// Every refusal says which argument, what was expected and what was given, and leaves everything as
// it was.
#include <chrono>
#include <cmath>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/core/error.h"
#include "tests/batch_norm/layer_run.h"
#include "tests/batch_norm/parts_run.h"
#include "tests/comm/worlds.h"

namespace normscope::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace std::chrono_literals;

void expect_unchanged(const LayerRun& run) {
  EXPECT_EQ(run.running_mean.values(), std::vector<double>(5, 0.5));
  EXPECT_EQ(run.running_var.values(), std::vector<double>(5, 2.0));
  // Unless a test changes it, y started as a copy of a tensor that was never written.
  EXPECT_TRUE(run.y.untouched_outside({.data = run.y.view().data}));
}

template <class Change>
std::string forward_refusal(const Change& change) {
  LayerRun run(Layer{}, first_samples(4));
  ForwardArguments arguments = run.forward_arguments();
  change(arguments);
  const std::string text =
      text_of<ArgumentError>([&] { batch_norm_forward(arguments, CallContext{}); });
  expect_unchanged(run);
  return text;
}

template <class Change>
std::string backward_refusal(const Change& change) {
  LayerRun run(Layer{}, first_samples(4));
  batch_norm_forward(run.forward_arguments(), {});
  BackwardArguments arguments = run.backward_arguments();
  change(arguments);
  const std::string text =
      text_of<ArgumentError>([&] { batch_norm_backward(arguments, CallContext{}); });
  EXPECT_TRUE(run.dx.untouched_outside({.data = run.dx.view().data}));
  EXPECT_EQ(run.dweight.values(), std::vector<double>(5, 0.0));
  return text;
}

TEST(ForwardErrors, NameTheArgumentWhatWasExpectedAndWhatWasGiven) {
  const auto refusal = [](const std::function<void(ForwardArguments&)>& change) {
    return forward_refusal(change);
  };

  EXPECT_EQ(refusal([](auto& a) { a.x.samples = -1; }),
            "x: expected no negative extent, got [-1, 5, 70]");
  EXPECT_EQ(refusal([](auto& a) { a.x.data = nullptr; }),
            "x: expected data, or an empty tensor, got none");
  EXPECT_EQ(refusal([](auto& a) { a.x.position_stride = 2; }),
            "x: expected position_stride 1 or channel_stride 1, got 2 and 70");
  EXPECT_EQ(refusal([](auto& a) { a.y.channels = 4; }),
            "y: expected the shape of x, [4, 5, 70], got [4, 4, 70]");
  EXPECT_EQ(refusal([](auto& a) { a.y.dtype = DType::kFloat64; }),
            "y: expected the dtype of x, float32, got float64");
  EXPECT_EQ(refusal([](auto& a) { a.y.data = nullptr; }),
            "y: expected data, or an empty tensor, got none");
  EXPECT_EQ(refusal([](auto& a) { a.y.data = const_cast<void*>(a.x.data); }),
            "y: expected memory of its own, got that of x");
  EXPECT_EQ(refusal([](auto& a) { a.y = channels_last(a.y.data, DType::kFloat32, 4, 5, 70); }),
            "y: expected the layout of x, got another");
  EXPECT_EQ(refusal([](auto& a) { a.weight.dtype = DType::kFloat16; }),
            "weight: expected float32 or the dtype of x, float32, got float16");
  EXPECT_EQ(refusal([](auto& a) { a.bias.dtype = DType::kBFloat16; }),
            "bias: expected float32 or the dtype of x, float32, got bfloat16");
  EXPECT_EQ(refusal([](auto& a) { a.running.mean.dtype = DType::kFloat64; }),
            "running_mean: expected float32 or the dtype of x, float32, got float64");
  EXPECT_EQ(refusal([](auto& a) { a.running.var.dtype = DType::kFloat64; }),
            "running_var: expected float32 or the dtype of x, float32, got float64");
  EXPECT_EQ(refusal([](auto& a) { a.eps = -1.0; }), "eps: expected at least 0, got -1");
  EXPECT_EQ(refusal([](auto& a) { a.eps = -1e-9; }), "eps: expected at least 0, got -1e-09");
  EXPECT_THAT(refusal([](auto& a) { a.eps = std::nan(""); }), StartsWith("eps: expected at least"));
  // Outputs are written in vectors that overlap, from inputs that are read twice.
  EXPECT_THAT(refusal([](auto& a) { a.residual = a.y.read_only(); }),
              StartsWith("y: expected memory"));
  EXPECT_EQ(refusal([](auto& a) { a.statistics = nullptr; }),
            "statistics: expected memory for 15 numbers, got none");
  OwnedMessage other(4);
  EXPECT_EQ(refusal([&](auto& a) { a.accumulated = other.view(); }),
            "accumulated: expected 5 channels, got 4");
  // Backward could not find it.
  EXPECT_THAT(refusal([](auto& a) {
                a.activation = {Activation::kSilu};
                a.residual = a.x;
              }),
              StartsWith("residual: expected"));
}

TEST(ForwardErrors, SlicesMustBeThoseOfTheBatch) {
  for (const std::int64_t slices : {-1, 0, 3, 5}) {  // 4 samples make 1, 2 or 4 slices
    EXPECT_THAT(forward_refusal([&](auto& a) { a.slices = slices; }),
                AllOf(StartsWith("slices: expected "),
                      HasSubstr("got " + std::to_string(slices) + " for 4")));
  }
}

TEST(BackwardErrors, NameTheArgumentWhatWasExpectedAndWhatWasGiven) {
  const auto refusal = [](const std::function<void(BackwardArguments&)>& change) {
    return backward_refusal(change);
  };

  EXPECT_EQ(refusal([](auto& a) { a.x.data = nullptr; }),
            "x: expected data, or an empty tensor, got none");
  EXPECT_EQ(refusal([](auto& a) { a.dy.samples = 3; }),
            "dy: expected the shape of x, [4, 5, 70], got [3, 5, 70]");
  EXPECT_EQ(refusal([](auto& a) { a.dy.dtype = DType::kFloat64; }),
            "dy: expected the dtype of x, float32, got float64");
  EXPECT_EQ(refusal([](auto& a) { a.dx.positions = 7; }),
            "dx: expected the shape of x, [4, 5, 70], got [4, 5, 7]");
  EXPECT_EQ(refusal([](auto& a) { a.dx.data = const_cast<void*>(a.x.data); }),
            "dx: expected memory of its own, got that of x");
  EXPECT_EQ(refusal([](auto& a) { a.dx.data = const_cast<void*>(a.dy.data); }),
            "dx: expected memory of its own, got that of dy");
  EXPECT_EQ(refusal([](auto& a) { a.weight.dtype = DType::kFloat16; }),
            "weight: expected float32 or the dtype of x, float32, got float16");
  EXPECT_EQ(refusal([](auto& a) { a.dweight.dtype = DType::kFloat64; }),
            "dweight: expected float32 or the dtype of x, float32, got float64");
  EXPECT_EQ(refusal([](auto& a) { a.dbias.dtype = DType::kFloat64; }),
            "dbias: expected float32 or the dtype of x, float32, got float64");
  EXPECT_EQ(refusal([](auto& a) { a.statistics = nullptr; }),
            "statistics: expected memory for 15 numbers, got none");
  EXPECT_THAT(refusal([](auto& a) { a.slices = 5; }), StartsWith("slices: expected "));
  EXPECT_THAT(refusal([](auto& a) { a.activation = {Activation::kHardSwish}; }),
              StartsWith("dz: expected"));
  for (const auto memory : {&BackwardArguments::x, &BackwardArguments::dy}) {
    EXPECT_THAT(refusal([&](auto& a) {
                  a.activation = {Activation::kSilu};
                  a.dz = a.dx;
                  a.dz.data = const_cast<void*>((a.*memory).data);
                }),
                HasSubstr("memory of its own"));
  }
  EXPECT_THAT(refusal([](auto& a) {
                a.activation = {Activation::kSilu};
                a.dz = a.dx;
              }),
              HasSubstr("memory of its own"));
}

TEST(ExecutionErrors, NameWhatIsMissing) {
  LayerRun run(Layer{}, first_samples(4));
  const auto refusal = [&](const Execution& execution) {
    CallContext context;
    context.execution = &execution;
    return text_of<ArgumentError>([&] { batch_norm_forward(run.forward_arguments(), context); });
  };

  EXPECT_EQ(refusal({.threads = 0}), "threads: expected at least 1, got 0");
  EXPECT_EQ(refusal({.threads = 2, .parallel_for = nullptr}),
            "parallel_for: expected a function, got none");
  expect_unchanged(run);
}

TEST(ExchangeErrors, NameWhatIsMissing) {
  EXPECT_EQ(text_of<ArgumentError>([] { Exchange exchange(nullptr); }),
            "communicator: expected one, got a null pointer");
}

TEST(OneValue, IsRefusedOnARankAloneAndNothingIsUpdated) {
  for (const int slices : {1, 2}) {  // of which the last has one sample
    LayerRun run({.positions = 1}, first_samples(2 * slices - 1), slices);

    const std::string text =
        text_of<OneValueError>([&] { batch_norm_forward(run.forward_arguments(), {}); });

    EXPECT_EQ(text,
              "x: expected more than 1 value per channel in the norm batch when training, got 1");
    expect_unchanged(run);
  }
}

// Kernels that find no memory when they apply the statistics.
Kernels without_memory_to_normalize() {
  Kernels kernels = default_kernels();
  kernels.normalize = [](const Execution&, const TensorView&, Statistics, const AffineActivation&,
                         const TensorView&, const MutableTensorView&) { throw std::bad_alloc(); };
  return kernels;
}

TEST(NoMemory, AfterTheStatisticsLeavesTheBuffersAsTheyWere) {
  const Kernels kernels = without_memory_to_normalize();
  for (const SliceStats slice_stats :
       {SliceStats::kPooled, SliceStats::kFirst, SliceStats::kSequential}) {
    LayerRun run(Layer{}, first_samples(4), 2);
    ForwardArguments arguments = run.forward_arguments();
    arguments.slice_stats = slice_stats;
    OwnedMessage moments(5);
    arguments.accumulated = moments.view();
    CallContext context;
    context.kernels = &kernels;

    EXPECT_THROW(batch_norm_forward(arguments, context), std::bad_alloc);

    expect_unchanged(run);
    EXPECT_EQ(run.updates[0], 3);
    EXPECT_EQ(moments.numbers(), OwnedMessage(5).numbers());
  }
}

class ErrorsOfRanks : public ::testing::TestWithParam<World> {};

TEST_P(ErrorsOfRanks, OneValueOverAllRanksIsRefusedOnAllAndTheGroupStaysUsable) {
  const World& world = GetParam();
  world.run(world.ranks, {}, [](Communicator& communicator) {
    Exchange exchange = exchange_over(communicator);
    const bool has_the_value = communicator.rank() == communicator.size() - 1;
    LayerRun run({.positions = 1}, first_samples(has_the_value ? 1 : 0));

    EXPECT_THROW(batch_norm_forward(run.forward_arguments(), context_of(&exchange)), OneValueError);

    expect_unchanged(run);
    LayerRun next(Layer{}, first_samples(1));
    next.step(context_of(&exchange));
    EXPECT_EQ(next.counts[0], 70.0 * communicator.size());
  });
}

TEST_P(ErrorsOfRanks, AnArgumentErrorOfOneRankReachesItsPeersAtOnce) {
  const World& world = GetParam();
  // The time limit is far beyond the limit of the whole test.
  world.run(world.ranks, {.time_limit = 24h}, [](Communicator& communicator) {
    Exchange exchange = exchange_over(communicator);
    LayerRun run(Layer{}, first_samples(4));
    ForwardArguments arguments = run.forward_arguments();
    const auto forward = [&] { batch_norm_forward(arguments, context_of(&exchange)); };
    if (communicator.rank() == 1) {
      arguments.eps = -1.0;
      EXPECT_THAT(text_of<ArgumentError>(forward), StartsWith("eps: expected"));
    } else {
      EXPECT_THAT(text_of<CommunicationError>(forward),
                  AllOf(StartsWith("forward of block.bn (5 channels, scope world): "),
                        HasSubstr("rank 1 of"), HasSubstr("eps: expected at least 0, got -1")));
    }
    expect_unchanged(run);
  });
}

// Kernels that find no memory for the sums of either direction.
Kernels without_memory_to_add() {
  Kernels kernels = default_kernels();
  kernels.add_moments = [](const Execution&, const TensorView&, LimbsView) {
    throw std::bad_alloc();
  };
  kernels.add_gradient_sums = [](const Execution&, const TensorView&, const TensorView&, Statistics,
                                 const AffineActivation&, LimbsView) { throw std::bad_alloc(); };
  return kernels;
}

TEST_P(ErrorsOfRanks, NoMemoryBeforeTheExchangeReachesThePeersAtOnce) {
  const World& world = GetParam();
  for (const bool is_backward : {false, true}) {
    world.run(world.ranks, {.time_limit = 24h}, [&](Communicator& communicator) {
      const Kernels kernels = without_memory_to_add();
      Exchange exchange = exchange_over(communicator);
      LayerRun run(Layer{}, first_samples(4));
      if (is_backward) batch_norm_forward(run.forward_arguments(), context_of(&exchange));
      CallContext context = context_of(&exchange);
      const auto call = [&] {
        if (is_backward) return batch_norm_backward(run.backward_arguments(), context);
        batch_norm_forward(run.forward_arguments(), context);
      };
      if (communicator.rank() == 1) {
        context.kernels = &kernels;
        EXPECT_THROW(call(), std::bad_alloc);
      } else {
        EXPECT_THAT(text_of<CommunicationError>(call), HasSubstr("it is out of memory"));
      }
    });
  }
}

TEST_P(ErrorsOfRanks, NoMemoryAfterTheExchangeLeavesTheBuffersAsTheyWere) {
  const World& world = GetParam();
  world.run(world.ranks, {}, [](Communicator& communicator) {
    const Kernels kernels = without_memory_to_normalize();
    Exchange exchange = exchange_over(communicator);
    LayerRun run(Layer{}, first_samples(4));
    CallContext context = context_of(&exchange);
    context.kernels = &kernels;

    EXPECT_THROW(batch_norm_forward(run.forward_arguments(), context), std::bad_alloc);

    expect_unchanged(run);
    EXPECT_EQ(run.updates[0], 3);
  });
}

TEST_P(ErrorsOfRanks, SlicesAndPeersExcludeEachOther) {
  const World& world = GetParam();
  world.run(world.ranks, {}, [](Communicator& communicator) {
    Exchange exchange = exchange_over(communicator);
    LayerRun run(Layer{}, first_samples(4), 2);

    EXPECT_EQ(text_of<ArgumentError>(
                  [&] { batch_norm_forward(run.forward_arguments(), context_of(&exchange)); }),
              "slices: expected 1 if statistics are shared with other ranks, got 2");
  });
}

INSTANTIATE_TEST_SUITE_P(Threads, ErrorsOfRanks, worlds({2, 4}, run_as_threads), ranks_of);
INSTANTIATE_TEST_SUITE_P(Processes, ErrorsOfRanks, worlds({2}, run_as_processes), ranks_of);

}  // namespace
}  // namespace normscope::testing
