// SPDX-License-Identifier: Apache-2.0
//
// The communicator over process groups of torch, with a backend that asks the same of its callers
// as NCCL's.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include "normscope/core/error.h"
#include "normscope/torch/c10d/communicator.h"
#include "normscope/torch/c10d/debug_wrapper.h"
#include "tests/support/ranks.h"
#include "tests/torch/store_backend.h"

namespace normscope::testing {
namespace {

using binding::C10dCommunicator;
// A device whose memory is the host's, for a group with a separate backend for devices.
constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;
C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::NoOpDeviceGuardImpl<kDevice>)

struct DeviceHooks final : at::PrivateUse1HooksInterface {
  at::Device getDeviceFromPtr(void* /*data*/) const override { return {kDevice, 0}; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
};

at::Tensor empty_on_device(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                           std::optional<at::Layout> /*layout*/,
                           std::optional<at::Device> /*device*/, std::optional<bool> /*pinned*/,
                           std::optional<at::MemoryFormat> /*format*/) {
  const at::Tensor of_host = at::empty(sizes, at::TensorOptions().dtype(dtype));
  return at::from_blob(
      of_host.mutable_data_ptr(), sizes, [of_host](void* /*data*/) {},
      of_host.options().device(kDevice), at::Device(kDevice));
}

at::Tensor& zero_on_device(at::Tensor& tensor) {
  std::memset(tensor.mutable_data_ptr(), 0, tensor.nbytes());
  return tensor;
}

const bool kHasHooks = [] {
  static DeviceHooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool /*non_blocking*/) {
  std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
  return to;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", copy_from);
  library.impl("empty.memory_format", empty_on_device);
  library.impl("zero_", zero_on_device);
}

at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.scalar_type());
}

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using namespace std::chrono_literals;

// What a backend and its parts were asked to do.
struct Calls {
  std::atomic<int> sums = 0;
  std::atomic<int> splits = 0;
  std::atomic<int> ends_of_parts = 0;
  std::atomic<int> aborts_of_parts = 0;
};

// Backend options of a type that only the program knows.
struct OptionsOfTheProgram final : c10d::Backend::Options {
  using Options::Options;
};

// Behaves like NCCL's backend: a group is connected by its first sum; all ranks of the group take
// part in a split, those without a part with ranks that they are not among, and wait for each
// other; a part keeps the options that it is given; and a sum on the caller's stream has no Work.
class SplittingBackend final : public StoreBackend {
 public:
  enum class Place { kGroup, kPart };

  SplittingBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Calls& calls,
                   c10::intrusive_ptr<Options> options, Place place = Place::kGroup)
      : StoreBackend(store, rank, size),
        calls_(calls),
        options_(std::move(options)),
        place_(place) {}

  const std::string getBackendName() const override { return options_->backend; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    ++calls_.sums;
    std::vector<at::Tensor> of_host{on_host(tensors.front())};
    auto work = StoreBackend::allreduce(of_host, options);
    if (getBackendName() != "nccl") return work;
    // It does not sum on a stream of its own either, which would have to wait for the caller's.
    TORCH_CHECK(!options.asyncOp, "expected a sum on the caller's stream");
    return nullptr;
  }

  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& part_store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override {
    ++calls_.splits;
    TORCH_CHECK(calls_.sums > 0, "expected a group that a sum has connected");
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

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Options = c10d::Backend::Options;
// One rank's group, whose backend behaves like NCCL's.
struct Member {
  Group group;
  Options& options;
  Calls& calls;
};

template <class OptionsOfBackend = Options>
void run_ranks(int ranks, const std::function<void(Member& member)>& body,
               const char* backend = "nccl") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  spawn_threads(ranks, [&](int rank) {
    Calls calls;
    const auto options = c10::make_intrusive<OptionsOfBackend>(backend);
    Member member{
        group_over(c10::make_intrusive<SplittingBackend>(store, rank, ranks, calls, options),
                   store),
        *options, calls};
    body(member);
  });
}

double exchanged_sum(Communicator& communicator, double value) {
  std::vector<double> values{value};
  communicator.all_reduce_sum(values);
  return values.front();
}

TEST(C10dCommunicator, ARankAloneInItsPartTakesPartInTheSplit) {
  run_ranks(5, [](Member& member) {
    C10dCommunicator communicator(member.group);
    const int rank = communicator.rank();

    const auto part = communicator.split(/*color=*/rank / 2, /*key=*/rank);

    EXPECT_EQ(member.calls.splits, 1);
    EXPECT_EQ(part->size(), rank == 4 ? 1 : 2);
    EXPECT_EQ(exchanged_sum(*part, rank), rank == 4 ? 4 : 2 * (rank / 2 * 2) + 1);
  });
}

TEST(C10dCommunicator, ABackendForDevicesIsConnectedBeforeItSplits) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ASSERT_TRUE(kHasHooks);
  spawn_threads(3, [&](int rank) {
    Calls of_host;
    Calls of_device;
    const auto backend = [&](const char* name, Calls& calls) {
      return c10::make_intrusive<SplittingBackend>(
          c10::make_intrusive<c10d::PrefixStore>(name, store), rank, 3, calls,
          c10::make_intrusive<Options>("nccl"));
    };
    const Group group = group_over(backend("host", of_host), store);
    group->setBackend(kDevice, c10d::ProcessGroup::BackendType::NCCL, backend("device", of_device));
    C10dCommunicator communicator(group, {.memory = Memory::kDevice, .device = kDevice});

    const auto part = communicator.split(/*color=*/rank / 2, /*key=*/rank);

    EXPECT_EQ(of_host.splits, 1);
    EXPECT_EQ(of_device.splits, 1);
    std::vector<double> values{rank + 1.0};
    if (rank < 2) part->all_reduce_sum(values, {.memory = Memory::kDevice});
    EXPECT_THAT(values, ElementsAre(3.0));
  });
}

TEST(C10dCommunicator, AGroupThatServesTheHostOnlyTakesMessagesOfADevice) {
  ASSERT_TRUE(kHasHooks);
  run_ranks(
      3,
      [](Member& member) {
        C10dCommunicator communicator(member.group, {.memory = Memory::kDevice, .device = kDevice});
        const int rank = communicator.rank();
        std::vector<double> values{rank + 1.0};

        communicator.all_reduce_sum(values, {.memory = Memory::kDevice});
        const auto part = communicator.split(/*color=*/rank / 2, /*key=*/rank);
        std::vector<double> of_part{rank + 1.0};
        if (rank < 2) part->all_reduce_sum(of_part, {.memory = Memory::kDevice});

        EXPECT_THAT(values, ElementsAre(6.0));
        EXPECT_THAT(of_part, ElementsAre(3.0));
        EXPECT_FALSE(communicator.takes_device_tensors());
        EXPECT_TRUE(communicator.compares_lengths());
        EXPECT_EQ(member.calls.splits, 1);
      },
      "of the program");
}

TEST(C10dCommunicator, ARankOfAWorldOfOneSplitsWithNobody) {
  run_ranks(1, [](Member& member) {
    C10dCommunicator communicator(member.group);

    EXPECT_EQ(communicator.split(/*color=*/0, /*key=*/0)->size(), 1);
    EXPECT_EQ(member.calls.splits, 0);
  });
}

TEST(C10dCommunicator, APartHasACopyOfTheGroupsOptions) {
  run_ranks(4, [](Member& member) {
    member.options.group_desc = "the group";
    member.options.global_ranks_in_group = {10, 11, 12, 13};
    C10dCommunicator communicator(member.group);
    const int rank = communicator.rank();

    const auto first = communicator.split(/*color=*/rank / 2, /*key=*/rank);
    const auto second = communicator.split(/*color=*/rank % 2, /*key=*/rank);

    EXPECT_EQ(member.options.group_desc, "the group");
    EXPECT_THAT(member.options.global_ranks_in_group, ElementsAre(10, 11, 12, 13));
    EXPECT_EQ(exchanged_sum(*first, rank), rank / 2 == 0 ? 1 : 5);
    EXPECT_EQ(exchanged_sum(*second, rank), rank % 2 == 0 ? 2 : 4);
  });
}

// The backend looks up ranks there. A default group that is not the process's first has none there.
TEST(C10dCommunicator, RanksMissingFromTheOptionsAreSetDuringASplit) {
  run_ranks(2, [](Member& member) {
    C10dCommunicator communicator(member.group);

    EXPECT_EQ(communicator.split(/*color=*/0, /*key=*/0)->size(), 2);
    EXPECT_TRUE(member.options.global_ranks_in_group.empty());
  });
}

TEST(C10dCommunicator, OptionsThatItCannotCopyKeepTheirRanks) {
  run_ranks<OptionsOfTheProgram>(
      2,
      [](Member& member) {
        member.options.global_ranks_in_group = {6, 7};
        C10dCommunicator communicator(member.group);

        EXPECT_EQ(communicator.split(/*color=*/0, /*key=*/-communicator.rank())->size(), 2);
        EXPECT_THAT(member.options.global_ranks_in_group, ElementsAre(6, 7));
      },
      "another backend");
}

// NCCL's backend writes more than the ranks into them.
TEST(C10dCommunicator, NcclIsNotSplitWithTheGroupsOwnOptions) {
  run_ranks<OptionsOfTheProgram>(2, [](Member& member) {
    C10dCommunicator communicator(member.group);

    EXPECT_THAT([&] { (void)communicator.split(/*color=*/0, /*key=*/0); },
                ThrowsMessage<CommunicationError>(HasSubstr("ProcessGroupNCCL.hpp")));
    EXPECT_EQ(member.calls.splits, 0);
    EXPECT_TRUE(member.options.global_ranks_in_group.empty());
  });
}

// Agrees to every call, which torch's debug mode compares among the ranks.
class Agreeing final : public StoreBackend {
 public:
  using StoreBackend::StoreBackend;

  void monitoredBarrier(const c10d::BarrierOptions& /*options*/, bool /*waits*/) override {}
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& /*options*/) override {
    for (const at::Tensor& output : outputs.front()) output.copy_(inputs.front());
    return c10::make_intrusive<Done>();
  }
};

// TORCH_DISTRIBUTED_DEBUG=DETAIL. The wrapper of torch 2.11 says that it can split, and throws.
TEST(C10dCommunicator, ABackendIsSplitThatTorchsDebugModeHasWrapped) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  spawn_threads(3, [&](int rank) {
    Calls calls;
    const auto backend = c10::make_intrusive<SplittingBackend>(
        store, rank, 3, calls, c10::make_intrusive<Options>("nccl"));
    const auto wrapper = c10::make_intrusive<c10d::ProcessGroupWrapper>(
        backend, c10::make_intrusive<Agreeing>(store, rank, 3));
    const Group group = group_over(wrapper, store);
    C10dCommunicator communicator(group);

    const auto part = communicator.split(/*color=*/rank / 2, /*key=*/rank);

    EXPECT_EQ(calls.splits, 1);
    EXPECT_EQ(exchanged_sum(*part, rank), rank == 2 ? 2 : 1);
  });
}

TEST(C10dCommunicator, APartIsAbortedUnlessItsGroupHasBeenDestroyedInGoodOrder) {
  for (const bool is_destroyed : {true, false}) {
    for (const bool has_failed : {true, false}) {
      run_ranks(2, [&](Member& member) {
        C10dCommunicator communicator(member.group);
        auto part = communicator.split(/*color=*/0, /*key=*/0);

        if (has_failed) part->fail("the weights are missing");
        if (is_destroyed) member.group.reset();
        part.reset();

        const bool is_in_order = is_destroyed && !has_failed;
        EXPECT_EQ(member.calls.ends_of_parts, is_in_order ? 1 : 0);
        EXPECT_EQ(member.calls.aborts_of_parts, is_in_order ? 0 : 1);
      });
    }
  }
}

TEST(C10dCommunicator, SumsOnTheCallersStreamWithoutAWork) {
  run_ranks(2, [](Member& member) {
    C10dCommunicator communicator(member.group);
    std::vector<double> values{communicator.rank() + 1.0};

    communicator.all_reduce_sum(values, {.memory = Memory::kDevice});

    EXPECT_EQ(member.calls.sums, 1);
    EXPECT_THAT(values, ElementsAre(3.0));
    EXPECT_EQ(exchanged_sum(communicator, 2.0), 4.0);
  });
}

// Ends after a wait for it has given up, and before anybody can ask whether it has ended.
class EndsBehindAWait final : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds limit) override {
    if (!isCompleted()) {
      finish();
      TORCH_CHECK(false, "Operation timed out!");
    }
    return Work::wait(limit);
  }
};

class BackendBehindAWait final : public StoreBackend {
 public:
  using StoreBackend::StoreBackend;

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    (void)StoreBackend::allreduce(tensors, options);
    return c10::make_intrusive<EndsBehindAWait>();
  }
};

TEST(C10dCommunicator, ASumThatEndsAfterAWaitGaveUpCounts) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  spawn_threads(2, [&](int rank) {
    const Group group = group_over(c10::make_intrusive<BackendBehindAWait>(store, rank, 2), store);
    C10dCommunicator communicator(group);

    EXPECT_EQ(exchanged_sum(communicator, rank + 1.0), 3.0);
  });
}

TEST(C10dCommunicator, RanksThatAreAllAloneNeedNoBackendThatSplits) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  spawn_threads(3, [&](int rank) {
    const auto group = group_over(c10::make_intrusive<StoreBackend>(store, rank, 3), store);
    C10dCommunicator communicator(group);

    EXPECT_EQ(communicator.split(/*color=*/rank, /*key=*/0)->size(), 1);
  });
}

}  // namespace
}  // namespace normscope::testing
