// SPDX-License-Identifier: Apache-2.0
//
// Messages in device memory that are passed to the NCCL communicator of torch's backend.
#include "normscope/torch/c10d/torch_nccl.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "normscope/core/error.h"
#include "normscope/torch/c10d/communicator.h"
#include "normscope/torch/c10d/own_group.h"
#include "tests/support/ranks.h"
#include "tests/torch/nccl_of_torch.h"
#include "tests/torch/own_groups.h"

namespace normscope::testing {
namespace {

using binding::C10dCommunicator;
using binding::OwnGroup;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using namespace std::chrono_literals;

constexpr Stream kOnDevice{.memory = Memory::kDevice};
constexpr int kInProgress = 7;
constexpr int kSystemError = 2;

// One of several ranks, each of which is a thread.
struct Rank {
  int number;
  c10d::ProcessGroupNCCL& backend;
  C10dCommunicator& communicator;

  // The sum over the ranks, once the device has it.
  double sum(double value) const {
    std::vector<double> values{value};
    communicator.all_reduce_sum(values, kOnDevice);
    synchronize_stream();
    return values.front();
  }

  // The error of the first message that is not queued. Those before it end too.
  std::string first_error() const {
    std::vector<double> values{1.0};
    for (;;) {
      try {
        communicator.all_reduce_sum(values, kOnDevice);
      } catch (const CommunicationError& error) {
        synchronize_stream();
        return error.what();
      }
      std::this_thread::sleep_for(10ms);
    }
  }
};

enum class Peers { kWatched, kNotWatched };

void run_ranks(int size, std::chrono::milliseconds limit, const std::function<void(Rank&)>& body,
               Peers peers = Peers::kWatched) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  spawn_threads(size, [&](int number) {
    const auto messages = c10::make_intrusive<c10d::PrefixStore>("messages", store);
    const auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(messages, number, size);
    const auto group = c10::make_intrusive<c10d::ProcessGroup>(store, number, size);
    group->setBackend(kDeviceOfNccl, c10d::ProcessGroup::BackendType::NCCL, backend);
    const std::string name = "own group of rank " + std::to_string(number);
    set_own_group(name, group);
    std::vector<int> ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    const auto own = std::make_shared<OwnGroup>(binding::PatientStore(store), name, "parent",
                                                OwnGroup::Use::kDevices, number, ranks, limit);
    own->make();
    C10dCommunicator communicator(group, {.memory = Memory::kDevice, .device = kDeviceOfNccl},
                                  limit, own);
    if (peers == Peers::kWatched) communicator.watch_peers();
    answers_of_nccl() = {};
    Rank rank{number, *backend, communicator};
    body(rank);
  });
}

TEST(TorchNccl, SumsOnceTorchHasConnectedTheRanks) {
  run_ranks(3, 60s, [](Rank& rank) {
    EXPECT_EQ(rank.sum(rank.number + 1.0), 6);
    EXPECT_EQ(answers_of_nccl().calls, 0);

    EXPECT_EQ(rank.sum(rank.number + 2.0), 9);
    EXPECT_EQ(rank.sum(0.5), 1.5);

    EXPECT_EQ(rank.backend.sums, 1);
    EXPECT_EQ(answers_of_nccl().calls, 2);
  });
}

template <class Number>
void expect_sums_and_rows(const Rank& rank) {
  const auto on_device =
      at::TensorOptions().dtype(c10::CppTypeToScalarType<Number>::value).device(kDeviceOfNccl, 0);
  std::vector<Number> sum{static_cast<Number>(rank.number), 10};
  std::vector<Number> own{static_cast<Number>(rank.number), 7};
  std::vector<Number> all(4);
  rank.communicator.sum_on_device(at::from_blob(sum.data(), {2}, on_device));
  at::Tensor rows = at::from_blob(all.data(), {2, 2}, on_device);
  rank.communicator.all_gather_on_device(rows, at::from_blob(own.data(), {2}, on_device));
  synchronize_stream();
  EXPECT_THAT(sum, ElementsAre(1, 20));
  EXPECT_THAT(all, ElementsAre(0, 7, 1, 7));
}

TEST(TorchNccl, SumsAndGathersEachTypeOfAMessage) {
  run_ranks(2, 60s, [](Rank& rank) {
    (void)rank.sum(0);
    expect_sums_and_rows<double>(rank);
    expect_sums_and_rows<float>(rank);
    expect_sums_and_rows<std::int64_t>(rank);
    expect_sums_and_rows<std::int32_t>(rank);
    EXPECT_EQ(answers_of_nccl().calls, 8);
  });
}

TEST(TorchNccl, SumsOnAnotherDeviceThanBefore) {
  run_ranks(2, 60s, [](Rank& rank) {
    EXPECT_EQ(rank.sum(1), 2);
    EXPECT_EQ(rank.sum(1), 2);
    const c10::DeviceGuard guard(c10::Device(kDeviceOfNccl, 1));
    EXPECT_EQ(rank.sum(1), 2);
    EXPECT_EQ(answers_of_nccl().calls, 2);
  });
}

TEST(TorchNccl, IsNotUsedIfNobodyWatchesThePeers) {
  run_ranks(
      2, 60s,
      [](Rank& rank) {
        (void)rank.sum(1);
        EXPECT_EQ(rank.sum(1), 2);
        EXPECT_EQ(rank.backend.sums, 2);
        EXPECT_EQ(answers_of_nccl().calls, 0);
      },
      Peers::kNotWatched);
}

TEST(TorchNccl, ARankThatDoesNotComeIsNamedAtTheLimit) {
  std::atomic<int> left = 2;
  run_ranks(3, 3s, [&](Rank& rank) {
    (void)rank.sum(1);
    if (rank.number == 2) {
      while (left > 0) std::this_thread::sleep_for(10ms);
      EXPECT_THAT(rank.first_error(), HasSubstr("rank 2 is not there"));
      return;
    }
    EXPECT_THAT(rank.first_error(),
                HasSubstr("rank 2 is not there (an exchange timed out: waited 3.0 s"));
    EXPECT_TRUE(rank.backend.is_aborted);
    --left;
  });
  EXPECT_FALSE(has_asked_in_default_mode());
}

TEST(TorchNccl, ARankThatComesLateIsWaitedForAndNamedIfItIsMissingLater) {
  std::atomic<bool> has_ended = false;
  run_ranks(2, 3s, [&](Rank& rank) {
    (void)rank.sum(1);
    if (rank.number == 1) std::this_thread::sleep_for(2500ms);
    EXPECT_EQ(rank.sum(1), 2);
    if (rank.number == 1) {
      EXPECT_THAT(rank.first_error(), HasSubstr("rank 0 is not there"));
      has_ended = true;
    }
    while (!has_ended) std::this_thread::sleep_for(10ms);
  });
}

TEST(TorchNccl, WorkThatIsCapturedHasNoLimit) {
  run_ranks(2, 1s, [](Rank& rank) {
    (void)rank.sum(1);
    answers_of_nccl().is_capturing = true;
    if (rank.number == 1) std::this_thread::sleep_for(2500ms);
    EXPECT_EQ(rank.sum(1), 2);
    EXPECT_EQ(answers_of_nccl().calls, 1);
  });
}

TEST(TorchNccl, AnErrorOfNcclEndsTheGroupWithItsText) {
  run_ranks(2, 60s, [](Rank& rank) {
    (void)rank.sum(1);
    if (rank.number == 0) answers_of_nccl().result = kSystemError;
    EXPECT_THAT(rank.first_error(), HasSubstr("ncclAllReduce: unhandled system error"));
  });
}

TEST(TorchNccl, ACommunicatorThatDoesNotBlockIsWaitedForUpToTheLimit) {
  run_ranks(2, 1s, [](Rank& rank) {
    (void)rank.sum(1);
    answers_of_nccl() = {.result = kInProgress, .async_error = 0};
    EXPECT_EQ(rank.sum(1), 2);
    answers_of_nccl().async_error = kInProgress;
    EXPECT_THAT(rank.first_error(), HasSubstr("timed out: waited 1.0 s for the other ranks"));
  });
}

}  // namespace
}  // namespace normscope::testing
