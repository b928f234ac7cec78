// SPDX-License-Identifier: Apache-2.0
//
// How ranks that share memory behave beyond the contract of every communicator.
#include "normscope/comm/slot_communicator.h"

#include <chrono>
#include <memory>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/comm/shared_memory_communicator.h"
#include "normscope/comm/shared_memory_segment.h"
#include "normscope/comm/thread_communicator.h"
#include "normscope/core/error.h"
#include "tests/comm/worlds.h"

namespace normscope::testing {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;

class SlotCommunicatorTest : public ::testing::TestWithParam<World> {};

TEST_P(SlotCommunicatorTest, ARankThatLeavesEndsTheWaitOfPeers) {
  const World& world = GetParam();
  world.run(world.ranks, {.time_limit = 24h}, [](Communicator& communicator) {
    communicator.all_reduce_sum({});
    if (communicator.rank() == 1) return;

    EXPECT_THAT(
        text_of<CommunicationError>([&] { communicator.all_reduce_sum({}); }),
        HasSubstr("rank 1 of " + std::to_string(communicator.size()) + " has left the group"));
  });
}

INSTANTIATE_TEST_SUITE_P(Threads, SlotCommunicatorTest, worlds({2, 4}, run_as_threads), ranks_of);
INSTANTIATE_TEST_SUITE_P(SharedMemory, SlotCommunicatorTest, worlds({2, 4}, run_as_processes),
                         ranks_of);

TEST(SlotCommunicatorArgumentsTest, NumbersOutOfRangeAreRefused) {
  EXPECT_THAT(text_of<ArgumentError>([] { (void)make_thread_communicators(0); }),
              HasSubstr("ranks: expected 1 to 65536, got 0"));
  EXPECT_THAT(
      text_of<ArgumentError>([] { (void)make_thread_communicators(2, {.slot_length = 0}); }),
      HasSubstr("slot_length: expected 1 to 1073741824, got 0"));
  EXPECT_THAT(
      text_of<ArgumentError>([] { (void)make_thread_communicators(2, {.time_limit = 0ms}); }),
      HasSubstr("time_limit: expected more than 0 ms, got 0 ms"));
}

TEST(SlotCommunicatorArgumentsTest, ARankBeyondTheGroupIsRefused) {
  const SharedMemorySegment segment = SharedMemorySegment::create(2);

  EXPECT_THAT(text_of<ArgumentError>([&] { (void)make_shared_memory_communicator(segment, 2); }),
              HasSubstr("rank: expected 0 to 1, got 2"));
  EXPECT_THAT(text_of<ArgumentError>([&] { (void)make_shared_memory_communicator(segment, -1); }),
              HasSubstr("rank: expected 0 to 1, got -1"));
}

TEST(SlotCommunicatorArgumentsTest, ARankCanJoinOnlyOnce) {
  const SharedMemorySegment segment = SharedMemorySegment::create(2);
  const auto joined = make_shared_memory_communicator(segment, 1);

  EXPECT_THAT(text_of<ArgumentError>([&] { (void)make_shared_memory_communicator(segment, 1); }),
              HasSubstr("rank: expected one that has not joined yet, got 1"));
}

}  // namespace
}  // namespace normscope::testing
