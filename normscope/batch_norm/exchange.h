// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "normscope/comm/communicator.h"
#include "normscope/core/export.h"
#include "normscope/core/header.h"

namespace normscope NORMSCOPE_EXPORT {

// What the ranks of a group meet for; kAgreement: to find out who shares statistics, kParameters:
// for the numbers of a whole module, where layer says what is done with them and channels how many
// they are; kStep: ahead of a step, for the samples that each of them has.
enum class Direction { kForward, kBackward, kDoubleBackward, kAgreement, kParameters, kStep };

// "forward".
[[nodiscard]] std::string_view name_of(Direction direction) noexcept;

// Whether this rank's forward will be followed by a backward. Ranks that disagree would hang there,
// so they all raise in forward.
enum class BackwardNeeded { kNo, kYes };

// What a rank is doing when it meets its group: compared across ranks, and named in errors.
struct CallLabel {
  std::string_view layer;  // qualified name; empty: known by its shape and call number only
  std::string_view scope;
  Direction direction = Direction::kForward;
  std::int64_t channels = 0;
  BackwardNeeded backward = BackwardNeeded::kYes;
  // Of a forward: what ranks must have in common for equal running statistics.
  double eps = 0.0;
  double momentum = 0.0;
};

// What happens in a group of one rank: nothing is sent, or (for tests) all is as with several.
enum class WhenAlone { kSkip, kExchange };

// A group of ranks that share statistics: a communicator, and what makes its messages safe.
class Exchange {
 public:
  // `names` are what errors call the ranks: those of the group that this one is a part of; none: 0,
  // 1, ...
  explicit Exchange(std::unique_ptr<Communicator> communicator,
                    WhenAlone when_alone = WhenAlone::kSkip, std::vector<int> names = {});

  [[nodiscard]] Communicator& communicator() const noexcept { return *communicator_; }

  // Whether statistics need a message at all.
  [[nodiscard]] bool sends() const noexcept {
    return communicator_->size() > 1 || when_alone_ == WhenAlone::kExchange;
  }

  // Replaces sums and count (message = sums, then kHeaderSize doubles of which the first is the
  // count) by their totals over the ranks: one all-reduce, behind a small one where the transport
  // cannot bear ranks that come with different lengths and this layer is new to the group.
  //
  // Throws MismatchError on every rank, naming what each rank was doing, where they disagree;
  // CommunicationError or TimeoutError, naming layer, direction and scope, where the exchange
  // failed.
  void all_reduce(const CallLabel& label, std::span<double> message, Stream stream);

  // The same for a message in a device's memory, whose header write_header() queues on the stream.
  // Nothing waits for the device; whoever reads the totals asks ranks_agree(), and reports the
  // number that this returns where they do not.
  int all_reduce_on_device(const CallLabel& label, double count, std::span<double> message,
                           Stream stream, const std::function<void(const Header&)>& write_header);

  // What this rank was doing in a call that a device has reported: "forward of block.bn (...)".
  [[nodiscard]] const std::string& reported_call(int number) const;

  // What errors call a rank of the communicator.
  [[nodiscard]] int name_of_rank(std::size_t rank) const noexcept;

  // Tells the peers that this rank will not come.
  void fail(std::string_view reason) noexcept { communicator_->fail(reason); }

 private:
  template <class Sum>
  int meet(const CallLabel& label, double count, std::span<const double> message, const Sum& sum);
  void compare(std::span<const double> totals) const;
  [[nodiscard]] std::string describe_here(const CallLabel& label) const;
  [[noreturn]] void throw_mismatch(const CallLabel& label);

  std::unique_ptr<Communicator> communicator_;
  WhenAlone when_alone_;
  std::vector<int> names_;
  std::unordered_map<std::uint64_t, int> seen_;  // numbers of the labels that have met this group
  std::vector<std::string> labels_;              // [number - 1]
  std::int64_t calls_ = 0;
};

// What this process has sent since it started.
struct CommunicationCounters {
  std::int64_t calls = 0;
  std::int64_t bytes = 0;  // payload of this rank's messages, whatever the transport
  double seconds = 0.0;    // spent in the exchange, waiting included
};
[[nodiscard]] CommunicationCounters communication_counters() noexcept;

}  // namespace normscope
