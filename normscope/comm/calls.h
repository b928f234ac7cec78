// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// The call in which a rank exchanges with its group: "forward" of "layer2.bn1".
struct CallName {
  std::string_view what;
  std::string_view layer;
};

// A layer's name in errors. Of a long one only the end is shown, which says more of a qualified
// name than its beginning: what follows in the error is not cut off then.
[[nodiscard]] std::string text_of_layer(std::string_view layer);

// kAlone: the call needed no peers.
enum class CallState : std::uint8_t { kNone, kWaits, kFinished, kFailed, kAlone };

// A rank's latest call.
struct RankCall {
  CallState state = CallState::kNone;
  std::string name;                // "forward of layer2.bn1"
  std::chrono::nanoseconds age{};  // since the state began
  std::uint64_t number = 0;        // counts the rank's calls
};

// "rank 3 last finished forward of layer2.bn1, 41.0 s ago; ranks 0, 1, 2 wait in forward of
// layer3.bn1"; empty if there was no call yet. `ranks[i]` is the rank to show for `calls[i]`.
[[nodiscard]] std::string who_is_where(const std::vector<RankCall>& calls,
                                       const std::vector<int>& ranks);

// The same if kNone may also mean an unknown call. Shows only known calls; empty if there are fewer
// than two.
[[nodiscard]] std::string who_is_where_if_known(std::vector<RankCall> calls,
                                                const std::vector<int>& ranks);

// Shows what the ranks of a group are doing. Shared memory with one line per rank: each rank writes
// its own line and reads all, without waiting. A write costs a few stores.
class CallBoard {
 public:
  // Size of a group's lines. They must be aligned to a cache line.
  [[nodiscard]] static std::size_t memory_bytes(int ranks) noexcept;
  static void initialize(void* memory, int ranks) noexcept;

  CallBoard(std::shared_ptr<void> lines, int rank, int ranks);

  // A board that shows only `members`, on the same lines.
  [[nodiscard]] CallBoard part(const std::vector<int>& members) const;

  // This rank begins a call, and ends it with `state`. If two threads write at the same time, one
  // of the writes is dropped.
  void begin(const CallName& name, CallState state = CallState::kWaits) noexcept;
  void end(CallState state) noexcept;

  // Writes the line of a rank that cannot access this memory.
  void show(int rank, const RankCall& call) noexcept;

  // By rank.
  [[nodiscard]] std::vector<RankCall> read() const;
  [[nodiscard]] int ranks() const noexcept { return static_cast<int>(places_.size()); }

  // This rank's own call.
  [[nodiscard]] RankCall read_own() const;

 private:
  struct Line;

  [[nodiscard]] Line& line(int place) const noexcept;
  [[nodiscard]] RankCall read(int place) const;

  std::shared_ptr<void> lines_;
  int place_;                // this rank's line
  std::vector<int> places_;  // the line of each rank
};

}  // namespace normscope
