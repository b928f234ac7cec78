// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>

#include <gtest/gtest.h>

#include "tests/comm/worlds.h"

namespace normscope::testing {

// Short: a message of a few hundred numbers is exchanged in pieces.
inline constexpr std::int64_t kSlotLength = 64;

// Far longer than any delay on a loaded machine: a test that reaches this limit has failed.
inline constexpr std::chrono::milliseconds kAmple = std::chrono::seconds(60);

// The contract of every communicator. Each transport instantiates it.
class CommunicatorContract : public ::testing::TestWithParam<World> {
 protected:
  static void run(const CommunicatorBody& body, std::chrono::milliseconds time_limit = kAmple) {
    const World& world = GetParam();
    world.run(world.ranks, {.time_limit = time_limit, .slot_length = kSlotLength}, body);
  }
};

// The part of the contract that needs at least two ranks.
class PeersContract : public CommunicatorContract {};

}  // namespace normscope::testing
