// SPDX-License-Identifier: Apache-2.0
//
// What ranks tell each other through a store whose server does not answer.
#include "normscope/torch/c10d/own_group.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace normscope::testing {
namespace {

using binding::OwnGroup;
using ::testing::HasSubstr;

// A store whose server can hang. Calls wait until the store is told to go on.
class HangingStore final : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    ++asked_;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !hangs_; });
    return HashStore::check(keys);
  }

  void hang(bool hangs) {
    const std::lock_guard lock(mutex_);
    hangs_ = hangs;
    changed_.notify_all();
  }

  [[nodiscard]] int asked() const { return asked_; }

 private:
  std::atomic<int> asked_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool hangs_ = false;
};

TEST(OwnGroup, AsksAServerThatHangsOnlyOnce) {
  const auto store = c10::make_intrusive<HangingStore>();
  OwnGroup group(store, "group", "parent", OwnGroup::Use::kHost, 0, {0, 1}, std::chrono::seconds(60));
  const std::unique_ptr<OwnGroup> part = group.part("part", {0, 1});
  group.fail("lost the network");
  ASSERT_EQ(group.failure(), "rank 0 failed: lost the network");
  ASSERT_EQ(part->failure(), std::nullopt);
  const int asked = store->asked();

  store->hang(true);

  EXPECT_EQ(group.failure(), std::nullopt);
  EXPECT_EQ(part->failure(), std::nullopt);
  EXPECT_TRUE(group.calls_of_others().empty());
  EXPECT_THAT(part->fail_after("a sum failed", [] { return ""; }),
              HasSubstr("the group's store does not answer"));
  EXPECT_EQ(store->asked(), asked + 1);
  store->hang(false);
}

}  // namespace
}  // namespace normscope::testing
