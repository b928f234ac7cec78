// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/calls.h"

#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/core/cache_lines.h"

namespace normscope::testing {
namespace {

using ::testing::MatchesRegex;
using namespace std::chrono_literals;

// The boards of all ranks of a group.
std::vector<CallBoard> boards_of(int ranks) {
  constexpr std::align_val_t kAlignment{kCacheLine};
  const std::shared_ptr<void> memory(::operator new(CallBoard::memory_bytes(ranks), kAlignment),
                                     [](void* address) { ::operator delete(address, kAlignment); });
  CallBoard::initialize(memory.get(), ranks);
  std::vector<CallBoard> boards;
  for (int rank = 0; rank < ranks; ++rank) boards.emplace_back(memory, rank, ranks);
  return boards;
}

TEST(WhoIsWhere, NamesAwaitedRanksFirst) {
  std::vector<CallBoard> boards = boards_of(5);
  for (const int rank : {0, 2}) {
    boards[static_cast<std::size_t>(rank)].begin({.what = "forward", .layer = "layer3.bn1"});
  }
  boards[1].begin({.what = "forward", .layer = "layer2.bn1"});
  boards[1].end(CallState::kFinished);
  boards[3].begin({.what = "backward", .layer = "stem"}, CallState::kAlone);

  const std::string text = who_is_where(boards[0].read(), {0, 1, 2, 3, 4});

  EXPECT_THAT(text, MatchesRegex("rank 1 last finished forward of layer2.bn1, 0.0 s ago; "
                                 "rank 3 last ran backward of stem without peers, 0.0 s ago; "
                                 "rank 4 has not made any call yet; "
                                 "ranks 0, 2 wait in forward of layer3.bn1"));
}

TEST(CallBoard, APartShowsOnlyItsMembers) {
  std::vector<CallBoard> boards = boards_of(3);
  boards[0].begin({.what = "forward", .layer = "a"});
  CallBoard part = boards[2].part({0, 2});
  part.begin({.what = "backward", .layer = "b"});

  EXPECT_EQ(who_is_where(part.read(), {0, 2}),
            "rank 0 waits in forward of a; rank 2 waits in backward of b");
  EXPECT_EQ(boards[1].read()[2].name, "backward of b");
}

TEST(CallBoard, ReadsAreConsistentDuringWrites) {
  std::vector<CallBoard> boards = boards_of(2);
  const std::string layers[] = {std::string(60, 'a'), std::string(60, 'b')};
  std::jthread writer([&](const std::stop_token& stop) {
    for (std::size_t i = 0; !stop.stop_requested(); ++i) {
      boards[1].begin({.what = "forward", .layer = layers[i % 2]});
      boards[1].end(CallState::kFinished);
    }
  });

  for (int i = 0; i < 100'000; ++i) {
    const RankCall call = boards[0].read()[1];
    if (call.state == CallState::kNone) continue;
    ASSERT_TRUE(call.name == "forward of " + layers[0] || call.name == "forward of " + layers[1])
        << call.name;
  }
}

}  // namespace
}  // namespace normscope::testing
