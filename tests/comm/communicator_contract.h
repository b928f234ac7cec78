// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>

#include <gtest/gtest.h>

#include "tests/comm/worlds.h"

namespace normscope::testing {

// Short, so that a message of a few hundred numbers goes in pieces.
inline constexpr std::int64_t kSlotLength = 64;

// Far more than a loaded machine delays a rank: where a test waits for it, the test has failed.
inline constexpr std::chrono::milliseconds kAmple = std::chrono::seconds(60);

// What every communicator promises. A transport joins by a line that instantiates it.
class CommunicatorContract : public ::testing::TestWithParam<World> {
 protected:
  static void run(const CommunicatorBody& body, std::chrono::milliseconds time_limit = kAmple) {
    const World& world = GetParam();
    world.run(world.ranks, {.time_limit = time_limit, .slot_length = kSlotLength}, body);
  }
};

// What only a group of two or more can show.
class PeersContract : public CommunicatorContract {};

}  // namespace normscope::testing
