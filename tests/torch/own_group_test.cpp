// SPDX-License-Identifier: Apache-2.0
//
// What ranks tell each other through a store, and whom they find missing.
#include "normscope/torch/c10d/own_group.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unistd.h>

#include "normscope/comm/calls.h"
#include "normscope/comm/thread_communicator.h"
#include "normscope/torch/c10d/publisher.h"
#include "tests/support/interrupting.h"
#include "tests/torch/idler.h"

namespace normscope::testing {
namespace {

using binding::OwnGroup;
using binding::PatientStore;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

// A store whose server can hang. Calls wait until the store is told to go on.
class HangingStore final : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    ++asked_;
    wait_until_it_goes_on();
    return HashStore::check(keys);
  }

  std::int64_t add(const std::string& key, std::int64_t value) override {
    wait_until_it_goes_on();
    return HashStore::add(key, value);
  }

  void hang(bool hangs) {
    const std::lock_guard lock(mutex_);
    hangs_ = hangs;
    changed_.notify_all();
  }

  [[nodiscard]] int asked() const { return asked_; }

 private:
  void wait_until_it_goes_on() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !hangs_; });
  }

  std::atomic<int> asked_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool hangs_ = false;
};

TEST(OwnGroup, AsksAServerThatHangsOnlyOnce) {
  const auto store = c10::make_intrusive<HangingStore>();
  OwnGroup group(PatientStore(store), "group", "parent", OwnGroup::Use::kHost, 0, {0, 1},
                 std::chrono::seconds(60));
  const std::unique_ptr<OwnGroup> part = group.part("part", {0, 1});
  group.fail("lost the network");
  ASSERT_EQ(group.failure(), "rank 0 failed: lost the network");
  ASSERT_EQ(part->failure(), std::nullopt);
  const int asked = store->asked();

  store->hang(true);

  EXPECT_EQ(group.failure(), std::nullopt);
  EXPECT_EQ(part->failure(), std::nullopt);
  EXPECT_TRUE(group.shown_by_others().empty());
  EXPECT_THAT(part->fail_after("a sum failed", [] { return ""; }),
              HasSubstr("the group's store does not answer"));
  EXPECT_EQ(store->asked(), asked + 1);
  store->hang(false);
}

TEST(OwnGroup, WritesNoFailureBetweenTheKeysOfTheProgramIfItsFirstWaitIsInterrupted) {
  const auto store = c10::make_intrusive<HangingStore>();
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(store, 0, 2);
  const Interrupting observer;
  store->hang(true);

  EXPECT_THROW(OwnGroup(*group, "group", OwnGroup::Use::kHost, 60s), std::domain_error);

  store->hang(false);
  while (!store->check({"normscope/group/host/of rank 0"})) std::this_thread::sleep_for(1ms);
  std::this_thread::sleep_for(100ms);  // questions after this one are answered in turn
  EXPECT_EQ(store->getNumKeys(), 1);
}

TEST(PatientStore, FreesWhatAQuestionHoldsBeforeItAnswers) {
  const PatientStore store(c10::make_intrusive<c10d::HashStore>());
  for (const bool throws : {false, true}) {
    std::atomic<bool> is_free = false;
    const auto free = [&is_free](void*) { is_free = true; };
    const std::future<bool> answer =
        store.begin([held = std::shared_ptr<void>(nullptr, free), throws](c10d::Store&) {
          if (throws) throw std::runtime_error("no answer");
          return true;
        });

    answer.wait();

    EXPECT_TRUE(is_free) << throws;
  }
}

std::string nowhere() { return ""; }

TEST(OwnGroup, NamesADeadProcessOfThisHostAtOnce) {
  const Idler dead;
  const Idler late;
  OwnGroup group(PatientStore(c10::make_intrusive<c10d::HashStore>()), "group", "parent",
                 OwnGroup::Use::kHost, 0, {0, 1, 2}, 60s);
  group.know_processes({getpid(), dead.id(), late.id()});
  const std::unique_ptr<OwnGroup> part = group.part("part", {0, 2, 1});
  dead.end();
  const auto begin = std::chrono::steady_clock::now();

  const std::string error = group.fail_after("a sum failed", nowhere);
  const std::string of_part = part->fail_after("a sum failed", nowhere);

  EXPECT_EQ(error, "rank 1 has died (a sum failed)");
  EXPECT_EQ(of_part, error);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 1900ms);
}

// How long rank 0 looks for rank 1, which does not answer.
std::chrono::steady_clock::duration search_for(std::int32_t process_of_1) {
  OwnGroup group(PatientStore(c10::make_intrusive<c10d::HashStore>()), "group", "parent",
                 OwnGroup::Use::kHost, 0, {0, 1}, 60s);
  group.know_processes({getpid(), process_of_1});
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(group.fail_after("a sum failed", nowhere), "rank 1 is not there (a sum failed)");
  return std::chrono::steady_clock::now() - begin;
}

TEST(OwnGroup, WaitsLongerForALivingProcessOfThisHostThanForTheOnlySilentRankOfAnother) {
  const Idler late;

  EXPECT_GE(search_for(late.id()), 2s);
  EXPECT_LT(search_for(0), 1s);
}

TEST(OwnGroup, RankZeroStaysUntilOthersHaveReadTheReason) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<bool> reads = false;
  const auto error_of = [&](int rank) {
    OwnGroup group(PatientStore(store), "group", "parent", OwnGroup::Use::kHost, rank, {0, 1, 2},
                   60s);
    if (rank == 1) group.fail("lost the network");
    if (rank == 2) reads = true;
    return group.fail_after("a sum failed", nowhere);
  };

  EXPECT_EQ(error_of(1), "rank 1 failed: lost the network");
  std::thread last([&] {
    std::this_thread::sleep_for(100ms);
    EXPECT_EQ(error_of(2), "rank 1 failed: lost the network");
  });
  EXPECT_EQ(error_of(0), "rank 1 failed: lost the network");

  EXPECT_TRUE(reads);
  last.join();
}

TEST(CallPublisher, ShowsCallsToRanksThatShareNoMemory) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto own_group_of = [&](int rank) {
    return std::make_shared<OwnGroup>(PatientStore(store), "group", "parent", OwnGroup::Use::kHost,
                                      rank, std::vector{0, 1}, 60s);
  };
  // Two groups of threads: each rank has a board of its own.
  const auto of_0 = make_thread_communicators(2);
  const auto of_1 = make_thread_communicators(2);
  CallBoard& board = *of_0[0]->calls();
  board.begin({.what = "forward", .layer = "block.bn 1"});
  binding::CallPublisher publisher(own_group_of(0), board, 1h);
  binding::CallPublisher peer(own_group_of(1), *of_1[1]->calls(), 1h);

  publisher.publish();
  peer.publish();

  const RankCall shown = of_1[1]->calls()->read().at(0);
  EXPECT_EQ(shown.state, CallState::kWaits);
  EXPECT_EQ(shown.name, "forward of block.bn 1");
  EXPECT_EQ(shown.number, 1U);
  EXPECT_GE(shown.age, 0s);
  EXPECT_LT(shown.age, 60s);
}

}  // namespace
}  // namespace normscope::testing
