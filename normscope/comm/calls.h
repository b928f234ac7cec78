// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "normscope/core/export.h"

namespace normscope NORMSCOPE_EXPORT {

// What a rank does when it meets its group: "forward" of "layer2.bn1".
struct CallName {
  std::string_view what;
  std::string_view layer;
};

// kAlone: it needed no peer for it.
enum class CallState : std::uint8_t { kNone, kWaits, kFinished, kFailed, kAlone };

// A rank's latest call.
struct RankCall {
  CallState state = CallState::kNone;
  std::string name;                // "forward of layer2.bn1"
  std::chrono::nanoseconds age{};  // since the state began
  std::uint64_t number = 0;        // of the rank's calls
};

// "rank 3 last finished forward of layer2.bn1, 41.0 s ago; ranks 0, 1, 2 wait in forward of
// layer3.bn1"; empty if there was no call yet. `ranks` are what the calls' ranks are called.
[[nodiscard]] std::string who_is_where(const std::vector<RankCall>& calls,
                                       const std::vector<int>& ranks);

// The same where some calls may be unknown, not only not made: of the known ones, if they are of
// more than one rank; else empty.
[[nodiscard]] std::string who_is_where_if_known(std::vector<RankCall> calls,
                                                const std::vector<int>& ranks);

// Where the ranks of a group show what they do: lines of a memory that all of them see, of which
// each writes its own and reads all, without waiting. Costs a writer some stores.
class CallBoard {
 public:
  // Bytes of the lines of a group, which lie at a multiple of a cache line.
  [[nodiscard]] static std::size_t memory_bytes(int ranks) noexcept;
  static void initialize(void* memory, int ranks) noexcept;

  CallBoard(std::shared_ptr<void> lines, int rank, int ranks);

  // The same lines for some of the ranks: of them alone the part tells.
  [[nodiscard]] CallBoard part(const std::vector<int>& members) const;

  // This rank begins a call, and ends it as `state` says. Where two threads come at once, one of
  // them is not shown.
  void begin(const CallName& name, CallState state = CallState::kWaits) noexcept;
  void end(CallState state) noexcept;

  // Shows what is known of another rank, which does not see this memory.
  void show(int rank, const RankCall& call) noexcept;

  // By rank.
  [[nodiscard]] std::vector<RankCall> read() const;
  [[nodiscard]] int ranks() const noexcept { return static_cast<int>(places_.size()); }

  // This rank's own.
  [[nodiscard]] RankCall read_own() const;

 private:
  struct Line;

  [[nodiscard]] Line& line(int place) const noexcept;
  [[nodiscard]] RankCall read(int place) const;

  std::shared_ptr<void> lines_;
  int place_;                // this rank's line
  std::vector<int> places_;  // of the ranks
};

}  // namespace normscope
