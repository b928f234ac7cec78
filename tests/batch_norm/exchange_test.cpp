// SPDX-License-Identifier: Apache-2.0
//
// What makes messages safe: if ranks make different calls, all learn what each was doing.
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/batch_norm/scope_exchange.h"
#include "normscope/core/error.h"
#include "normscope/core/text.h"
#include "tests/batch_norm/layer_run.h"
#include "tests/comm/worlds.h"
#include "tests/support/ranks.h"

namespace normscope::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace std::chrono_literals;

struct Meeting {
  std::string name;
  World world;
  bool compares_lengths;
};

struct Forward {
  std::string layer = "block.bn";
  std::string scope = "world";
  std::int64_t channels = 5;
  BackwardNeeded backward = BackwardNeeded::kYes;
  DType dtype = DType::kFloat32;
  double eps = 0.5;
  double momentum = 0.125;
  // What is said in addition, where only this differs.
  const char* details = "";
};

std::string described(const Forward& forward) {
  return "forward of " +
         (forward.layer.empty() ? "a layer without a name" : printable(forward.layer)) + " (" +
         std::to_string(forward.channels) + " channels, scope " + forward.scope +
         (forward.backward == BackwardNeeded::kNo ? ", nothing needs a gradient)" : ")") +
         forward.details;
}

class Mismatch : public ::testing::TestWithParam<Meeting> {
 protected:
  static void run(const std::function<void(Exchange&)>& body) {
    const Meeting& meeting = GetParam();
    meeting.world.run(meeting.world.ranks, {}, [&](Communicator& communicator) {
      if (meeting.compares_lengths) {
        Exchange exchange = exchange_over(communicator);
        body(exchange);
      } else {
        Exchange exchange(std::make_unique<FragileCommunicator>(communicator));
        body(exchange);
      }
    });
  }

  // All ranks step together through a common layer.
  static void expect_usable(Exchange& exchange, const CallContext& context) {
    LayerRun run(Layer{}, first_samples(1));
    run.step(context);
    EXPECT_EQ(run.counts[0], 70.0 * exchange.communicator().size());
  }

  // The error that this rank gets in this forward.
  static std::string refusal(const Forward& forward, const CallContext& context) {
    LayerRun run({.dtype = forward.dtype, .channels = forward.channels}, first_samples(2));
    ForwardArguments arguments = run.forward_arguments();
    arguments.backward = forward.backward;
    arguments.eps = forward.eps;
    arguments.running.momentum = forward.momentum;
    const std::string text =
        text_of<MismatchError>([&] { batch_norm_forward(arguments, context); });
    EXPECT_EQ(run.running_mean[0], 0.5);
    return text;
  }

  static std::string rank_line(int rank, const std::string& what) {
    return std::string("\n  rank ") + std::to_string(rank) + ": " + what + "\n";
  }
};

TEST_P(Mismatch, OfForwardsIsNamedToEveryRankInFull) {
  std::string name = "backbone";
  for (int level = 0; level < 40; ++level) name += ".stage" + std::to_string(level);
  constexpr const char* kNumbers = " with eps 0.5 and momentum 0.125";
  const std::pair<Forward, Forward> of_others_and_the_last[] = {
      {{}, {.layer = name}},
      {{}, {.channels = 6}},
      {{}, {.scope = "group:2"}},
      {{}, {.backward = BackwardNeeded::kNo}},
      {{.layer = ""}, {.layer = "", .channels = 6}},
      {{.layer = "b\x7f\n"}, {.layer = "a\x1b[2J"}},
      {{.details = " with float32 input"},
       {.dtype = DType::kFloat64, .details = " with float64 input"}},
      {{.details = kNumbers}, {.eps = 0.25, .details = " with eps 0.25 and momentum 0.125"}},
      {{.details = kNumbers}, {.momentum = 0.75, .details = " with eps 0.5 and momentum 0.75"}},
      {{.eps = 1e-5, .details = " with eps 1e-05 and momentum 0.125"},
       {.eps = double{1e-5F}, .details = " with eps 9.999999747378752e-06 and momentum 0.125"}},
  };
  for (const auto& [others, last] : of_others_and_the_last) {
    run([&](Exchange& exchange) {
      SCOPED_TRACE(described(last));
      const Forward& own = is_last(exchange) ? last : others;
      CallContext context = context_of(&exchange);
      context.layer = own.layer;
      context.scope = own.scope;

      EXPECT_THAT(refusal(own, context),
                  AllOf(HasSubstr(rank_line(0, described(others))),
                        HasSubstr(rank_line(exchange.communicator().size() - 1, described(last)))));
      context.layer = others.layer;
      context.scope = others.scope;
      expect_usable(exchange, context);
    });
  }
}

TEST_P(Mismatch, OfDirectionsIsNamedToEveryRank) {
  run([](Exchange& exchange) {
    const CallContext context = context_of(&exchange);
    LayerRun run(Layer{}, first_samples(2));
    batch_norm_forward(run.forward_arguments(), context);

    const std::string text = text_of<MismatchError>([&] {
      if (is_last(exchange)) {
        batch_norm_backward(run.backward_arguments(), context);
      } else {
        LayerRun again(Layer{}, first_samples(2));
        CallContext other = context;
        other.layer = "next.bn";
        batch_norm_forward(again.forward_arguments(), other);
      }
    });

    EXPECT_THAT(text, AllOf(HasSubstr(rank_line(0, "forward of next.bn (5 channels, scope world)")),
                            HasSubstr("backward of block.bn (5 channels, scope world)")));
    expect_usable(exchange, context);
  });
}

// A layer that only some ranks have come with, in vain, is still new to all of them.
TEST_P(Mismatch, LeavesNoRankWithMoreKnownLayersThanItsPeers) {
  run([](Exchange& exchange) {
    CallContext context = context_of(&exchange);
    if (is_last(exchange)) context.layer = "head.bn";
    (void)refusal({}, context);

    CallContext first = context_of(&exchange);
    CallContext second = first;
    second.layer = "head.bn";
    expect_usable(exchange, first);
    expect_usable(exchange, second);
  });
}

std::vector<Meeting> meetings() {
  std::vector<Meeting> meetings;
  for (const int ranks : {2, 3}) {
    const std::string suffix = std::string("_") + std::to_string(ranks);
    meetings.push_back({"threads" + suffix, {ranks, run_as_threads}, true});
    meetings.push_back({"fragile" + suffix, {ranks, run_as_threads}, false});
    meetings.push_back({"processes" + suffix, {ranks, run_as_processes}, true});
  }
  return meetings;
}

INSTANTIATE_TEST_SUITE_P(Transports, Mismatch, ::testing::ValuesIn(meetings()),
                         [](const auto& meeting) { return meeting.param.name; });

// Another rank makes another call, and is gone when the ranks tell each other what they were doing.
class LeftInAMismatch final : public Communicator {
 public:
  [[nodiscard]] int rank() const noexcept override { return 0; }
  [[nodiscard]] int size() const noexcept override { return 2; }
  [[nodiscard]] std::string_view transport() const noexcept override { return "test"; }
  [[nodiscard]] bool compares_lengths() const noexcept override { return true; }
  void all_reduce_sum(std::span<double> /*values*/, Stream /*stream*/) override {
    if (++exchanges_ == 1) throw MismatchError("");
    throw CommunicationError("rank 1 of 2 has left the group");
  }
  [[nodiscard]] std::unique_ptr<Communicator> split(int /*color*/, int /*key*/) override {
    return nullptr;
  }
  void fail(std::string_view /*reason*/) noexcept override {}

 private:
  int exchanges_ = 0;
};

TEST(Failures, WhileRanksTellWhatTheyWereDoingNameTheCall) {
  Exchange exchange(std::make_unique<LeftInAMismatch>());
  LayerRun run(Layer{}, first_samples(2));

  EXPECT_EQ(text_of<CommunicationError>(
                [&] { batch_norm_forward(run.forward_arguments(), context_of(&exchange)); }),
            "forward of block.bn (5 channels, scope world): rank 1 of 2 has left the group");
}

TEST(PartOfAGroup, ErrorsCallTheRanksAsTheGroupDoes) {
  run_as_threads(5, {}, [](Communicator& communicator) {
    Exchange group = exchange_over(communicator);
    const int rank = communicator.rank();
    const std::unique_ptr<Exchange> part = make_part_of(group, {0, 0, 0, 3, 3});
    const std::string layer = "layer" + std::to_string(rank);
    std::vector<double> message(kHeaderSize);

    const std::string text = text_of<MismatchError>([&] {
      part->all_reduce({.layer = layer, .scope = "group:3", .channels = 2}, message, {});
    });

    EXPECT_THAT(text, HasSubstr("rank " + std::to_string(rank) + ": forward of " + layer));
    EXPECT_EQ(text.find("rank 0: ") == std::string::npos, rank >= 3);
  });
}

TEST(Timeouts, NameLayerDirectionScopeAndMissingRanks) {
  PipeGate timed_out;
  run_as_threads(3, {.time_limit = 50ms}, [&](Communicator& communicator) {
    Exchange exchange = exchange_over(communicator);
    if (communicator.rank() > 0) {
      timed_out.wait();
      return;
    }
    LayerRun run(Layer{}, first_samples(2));

    EXPECT_THAT(text_of<TimeoutError>(
                    [&] { batch_norm_forward(run.forward_arguments(), context_of(&exchange)); }),
                AllOf(StartsWith("forward of block.bn (5 channels, scope world): "),
                      HasSubstr("ranks 1, 2")));
    EXPECT_EQ(run.running_mean[0], 0.5);
    timed_out.open_for(2);
  });
}

TEST(AbsentGradients, ARankThatWantsNoInputGradientStillSendsItsSums) {
  run_as_threads(2, {}, [](Communicator& communicator) {
    Exchange exchange = exchange_over(communicator);
    const Layer layer;
    const auto rank = static_cast<std::size_t>(communicator.rank());
    LayerRun whole(layer, first_samples(6));
    whole.step({});
    LayerRun run(layer, in_order(6, 2)[rank]);
    batch_norm_forward(run.forward_arguments(), context_of(&exchange));
    BackwardArguments arguments = run.backward_arguments();
    if (rank == 1) arguments.dx.data = nullptr;

    batch_norm_backward(arguments, context_of(&exchange));

    if (rank == 1) return;
    run.dx.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
      ASSERT_EQ(run.dx.at(n, c, p), whole.dx.at(n, c, p));
    });
  });
}

}  // namespace
}  // namespace normscope::testing
