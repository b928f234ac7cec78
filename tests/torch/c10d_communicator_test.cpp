// SPDX-License-Identifier: Apache-2.0
//
// The communicator over process groups of torch, whose backend keeps to what NCCL's asks of
// callers.
#include "normscope/torch/c10d_communicator.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "normscope/core/error.h"
#include "tests/support/ranks.h"
#include "tests/torch/store_backend.h"

namespace normscope::testing {
namespace {

using binding::C10dCommunicator;
using ::testing::ElementsAre;
using namespace std::chrono_literals;

// What a backend and its parts were asked for.
struct Calls {
  std::atomic<int> sums = 0;
  std::atomic<int> splits = 0;
  std::atomic<int> ends_of_parts = 0;
  std::atomic<int> aborts_of_parts = 0;
};

// A backend of which more is known than of the others, to the program alone.
struct OptionsOfTheProgram final : c10d::Backend::Options {
  OptionsOfTheProgram() : Options("nccl") {}
};

// Keeps to what NCCL's backend does: all ranks of the group take part in a split, those of no part
// with ranks that they are not among, and wait for each other; the options given are the part's
// from then on; and a sum on the caller's stream comes without a Work.
class SplittingBackend final : public StoreBackend {
 public:
  enum class Place { kGroup, kPart };

  SplittingBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Calls& calls,
                   c10::intrusive_ptr<Options> options, Place place = Place::kGroup)
      : StoreBackend(store, rank, size),
        calls_(calls),
        options_(std::move(options)),
        place_(place) {}

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    ++calls_.sums;
    auto work = StoreBackend::allreduce(tensors, options);
    // Neither does it sum on a stream of its own, which would have to wait for the caller's.
    TORCH_CHECK(!options.asyncOp, "expected a sum on the caller's stream");
    return nullptr;
  }

  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& part_store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override {
    ++calls_.splits;
    meet();
    const auto own = std::ranges::find(ranks, getRank());
    if (own == ranks.end()) return nullptr;
    std::vector<std::uint64_t> global_ranks;
    for (const int rank : ranks) {
      global_ranks.push_back(options_->global_ranks_in_group.at(static_cast<std::size_t>(rank)));
    }
    options->global_ranks_in_group = std::move(global_ranks);
    options->group_desc = "a part";
    return c10::make_intrusive<SplittingBackend>(part_store, static_cast<int>(own - ranks.begin()),
                                                 static_cast<int>(ranks.size()), calls_, options,
                                                 Place::kPart);
  }

  void shutdown() override {
    if (place_ == Place::kPart) ++calls_.ends_of_parts;
  }
  void abort() override {
    if (place_ == Place::kPart) ++calls_.aborts_of_parts;
  }

 private:
  void meet() {
    const std::string key = "split " + std::to_string(meetings_++);
    if (store()->add(key, 1) == getSize()) store()->set(key + " is full", "");
    store()->wait({key + " is full"}, 2s);
  }

  Calls& calls_;
  c10::intrusive_ptr<Options> options_;
  Place place_;
  int meetings_ = 0;
};

c10::intrusive_ptr<c10d::ProcessGroup> group_of(const c10::intrusive_ptr<c10d::Store>& store,
                                                const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto group =
      c10::make_intrusive<c10d::ProcessGroup>(store, backend->getRank(), backend->getSize());
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  return group;
}

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Options = c10d::Backend::Options;
using Body = std::function<void(Group group, Options& options, Calls& calls)>;

// Each rank with a group whose backend does as NCCL's does.
template <class OptionsOfBackend = Options, class... Arguments>
void run_ranks(int ranks, const Body& body, const Arguments&... of_options) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  spawn_threads(ranks, [&](int rank) {
    Calls calls;
    const auto options = c10::make_intrusive<OptionsOfBackend>(of_options...);
    body(group_of(store, c10::make_intrusive<SplittingBackend>(store, rank, ranks, calls, options)),
         *options, calls);
  });
}

double exchanged_sum(Communicator& communicator, double value) {
  std::vector<double> values{value};
  communicator.all_reduce_sum(values);
  return values.front();
}

TEST(C10dCommunicator, ARankOfAWorldOfOneSplitsWithNobody) {
  run_ranks(
      1,
      [](const Group& group, Options& /*options*/, Calls& calls) {
        C10dCommunicator communicator(group);

        EXPECT_EQ(communicator.split(/*color=*/0, /*key=*/0)->size(), 1);
        EXPECT_EQ(calls.splits, 0);
      },
      "nccl");
}

// The backend looks up there what a default group that is not the process's first has left out.
TEST(C10dCommunicator, RanksThatTheOptionsLackAreThereDuringASplit) {
  run_ranks(
      2,
      [](const Group& group, Options& options, Calls& /*calls*/) {
        C10dCommunicator communicator(group);

        EXPECT_EQ(communicator.split(/*color=*/0, /*key=*/0)->size(), 2);
        EXPECT_TRUE(options.global_ranks_in_group.empty());
      },
      "nccl");
}

TEST(C10dCommunicator, OptionsThatItCannotCopyKeepTheirRanks) {
  run_ranks<OptionsOfTheProgram>(2, [](const Group& group, Options& options, Calls& /*calls*/) {
    options.global_ranks_in_group = {6, 7};
    C10dCommunicator communicator(group);

    EXPECT_EQ(communicator.split(/*color=*/0, /*key=*/-communicator.rank())->size(), 2);
    EXPECT_THAT(options.global_ranks_in_group, ElementsAre(6, 7));
  });
}

TEST(C10dCommunicator, SumsOnTheCallersStreamWithoutAWork) {
  run_ranks(
      2,
      [](const Group& group, Options& /*options*/, Calls& calls) {
        C10dCommunicator communicator(group);
        std::vector<double> values{communicator.rank() + 1.0};

        communicator.all_reduce_sum(values, {.memory = Memory::kDevice});

        EXPECT_EQ(calls.sums, 1);
        EXPECT_THAT(values, ElementsAre(3.0));
        EXPECT_EQ(exchanged_sum(communicator, 2.0), 4.0);
      },
      "nccl");
}

TEST(C10dCommunicator, RanksThatAreAllAloneNeedNoBackendThatSplits) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  spawn_threads(3, [&](int rank) {
    const auto group = group_of(store, c10::make_intrusive<StoreBackend>(store, rank, 3));
    C10dCommunicator communicator(group);

    EXPECT_EQ(communicator.split(/*color=*/rank, /*key=*/0)->size(), 1);
  });
}

}  // namespace
}  // namespace normscope::testing
