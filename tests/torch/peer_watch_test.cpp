// SPDX-License-Identifier: Apache-2.0
//
// What a rank knows of its peers while its exchanges are only queued on a device.
#include <atomic>
#include <chrono>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unistd.h>

#include "normscope/core/error.h"
#include "normscope/torch/c10d/communicator.h"
#include "normscope/torch/c10d/own_group.h"
#include "normscope/torch/c10d/periodic_thread.h"
#include "tests/torch/idler.h"
#include "tests/torch/own_groups.h"
#include "tests/torch/store_backend.h"

namespace normscope::testing {
namespace {

using binding::C10dCommunicator;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using namespace std::chrono_literals;

// The memory of the device is the host's.
constexpr binding::Placement kOnDevice{.memory = Memory::kDevice};

// Rank 0 of two, over a backend that sums on a device and whose peer never comes.
class WatchedPeer : public ::testing::Test {
 protected:
  using OwnGroup = binding::OwnGroup;

  struct Backend final : StoreBackend {
    using StoreBackend::StoreBackend;
    const std::string getBackendName() const override { return "nccl"; }
    c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& /*tensors*/,
                                             const c10d::AllreduceOptions& /*options*/) override {
      ++queued;
      return nullptr;
    }
    void abort() override { is_aborted = true; }

    int queued = 0;
    std::atomic<bool> is_aborted = false;
  };

  static std::shared_ptr<OwnGroup> own_group_of(const c10::intrusive_ptr<c10d::Store>& store,
                                                int rank) {
    return std::make_shared<OwnGroup>(binding::PatientStore(store), "own", "parent",
                                      OwnGroup::Use::kDevices, rank, std::vector<int>{0, 1}, 60s);
  }

  WatchedPeer() {
    group_->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::NCCL, backend_);
    set_own_group("own", group_);
    store_->set("made/1", "1");  // rank 1 has come to the rendezvous
    own_->make();
  }

  // The error of the first exchange that is not queued.
  std::string first_error(C10dCommunicator& communicator) {
    std::vector<double> values{1.0};
    for (;;) {
      const int queued = backend_->queued;
      try {
        communicator.all_reduce_sum(values, {.memory = Memory::kDevice});
      } catch (const CommunicationError& error) {
        EXPECT_EQ(backend_->queued, queued);
        return error.what();
      }
      std::this_thread::sleep_for(10ms);
    }
  }

  void expect_abort() const {
    for (int i = 0; i < 500 && !backend_->is_aborted; ++i) std::this_thread::sleep_for(10ms);
    EXPECT_TRUE(backend_->is_aborted);
  }

  c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  c10::intrusive_ptr<Backend> backend_ = c10::make_intrusive<Backend>(store_, 0, 2);
  Group group_ = c10::make_intrusive<c10d::ProcessGroup>(store_, 0, 2);
  std::shared_ptr<OwnGroup> own_ = own_group_of(store_, 0);
};

TEST_F(WatchedPeer, HasToldItsFailureBeforeTheNextExchange) {
  C10dCommunicator communicator(group_, kOnDevice, std::nullopt, own_);
  communicator.watch_peers();
  std::vector<double> values{1.0};
  communicator.all_reduce_sum(values, {.memory = Memory::kDevice});
  EXPECT_EQ(backend_->queued, 1);

  own_group_of(store_, 1)->publish_failure("it is out of memory");

  EXPECT_EQ(first_error(communicator), "nccl: rank 0 of 2: rank 1 failed: it is out of memory");
  expect_abort();
}

TEST_F(WatchedPeer, HasDiedBeforeTheNextExchange) {
  const Idler peer;
  own_->know_processes({getpid(), peer.id()});
  C10dCommunicator communicator(group_, kOnDevice, std::nullopt, own_);
  communicator.watch_peers();

  peer.end();

  EXPECT_EQ(first_error(communicator), "nccl: rank 0 of 2: rank 1 has died");
  expect_abort();
}

TEST(PeriodicThread, TriesAgainIfThereIsNoMemoryForATurn) {
  int turns = 0;
  std::jthread thread = binding::periodic_thread(1ms, [&] {
    if (++turns == 1) throw std::bad_alloc();
    return turns < 3;
  });

  thread.join();
  EXPECT_EQ(turns, 3);
}

}  // namespace
}  // namespace normscope::testing
