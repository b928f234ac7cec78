// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "normscope/comm/describe.h"
#include "normscope/comm/hosts.h"
#include "normscope/comm/message_length.h"
#include "normscope/comm/slot_communicator.h"
#include "normscope/core/error.h"

namespace normscope {
namespace {

// The leader is the first rank of a host's memory.
constexpr int kLeader = 0;

// A leader announces this length if the lengths of any two ranks, on any hosts, differ.
constexpr std::int64_t kLengthsDiffer = -1;

// In an exchange, every rank of a host writes its values to its slot. The leader waits for them,
// adds the slots, adds the hosts' sums with the other leaders, and writes the result to its own
// slot. The other ranks wait for the leader and read the result there.
//
// A slot can be written again two epochs later: the leader announces an epoch only after all ranks
// have announced it and it has read their slots, and a rank announces an epoch only after it has
// read the leader's slot of the epoch before.
class TwoLevelCommunicator final : public SlotCommunicator {
 public:
  TwoLevelCommunicator(std::unique_ptr<Communicator> whole, const Hosts& hosts)
      : SlotCommunicator(SlotMemory(hosts.memory->memory(), hosts.memory->bytes()),
                         place_of(whole->rank(), hosts.members),
                         "shared memory and " + std::string(whole->transport()), hosts.members,
                         whole->size()),
        whole_(std::move(whole)),
        leaders_(hosts.leaders) {
    if (const CallBoard* const board = whole_->calls()) show_calls_on(*board, /*shows_all=*/false);
    // Each rank that is no leader gets a part of its own, which costs nothing.
    between_ = whole_->split(leads() ? 0 : 1 + rank(), rank());
  }

  ~TwoLevelCommunicator() override {
    between_.reset();
    leave();
  }

  [[nodiscard]] bool compares_lengths() const noexcept override {
    return whole_->compares_lengths();
  }

  void all_reduce_sum(std::span<double> values, Stream stream) override {
    check_host_memory(*this, stream);
    try {
      SlotCommunicator::all_reduce_sum(values, stream);
    } catch (const MismatchError&) {
      throw;  // on every rank: no one needs to be notified
    } catch (...) {
      if (is_at_home()) notify_other_hosts();
      throw;
    }
  }

  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override {
    throw_if_unusable();
    return over_hosts(whole_->split(color, key), options().time_limit);
  }

  // Ranks of this host throw at once. Ranks of other hosts throw when this host's leader comes to
  // its next exchange, or at once if this rank is the leader.
  void fail(std::string_view reason) noexcept override {
    if (!is_at_home()) return;
    SlotCommunicator::fail(reason);
    notify_other_hosts();
  }

 private:
  [[nodiscard]] bool leads() const noexcept { return place() == kLeader; }

  [[nodiscard]] bool sum_piece(std::span<double> piece, std::size_t length) override {
    return leads() ? sum_and_publish(piece, length) : follow(piece);
  }

  [[nodiscard]] bool sum_and_publish(std::span<double> piece, std::size_t length) {
    show_arrival();
    wait_for({.first = kLeader + 1, .last = all().last});
    const bool agree = sum_of_hosts(piece, length);
    if (agree) {
      std::ranges::copy(piece, slot(kLeader));
    } else {
      this->length(kLeader) = kLengthsDiffer;
    }
    announce();
    return agree;
  }

  [[nodiscard]] bool follow(std::span<double> piece) {
    announce();
    wait_for({.first = kLeader, .last = kLeader + 1});
    if (length(kLeader) == kLengthsDiffer) return false;
    std::copy_n(slot(kLeader), piece.size(), piece.begin());
    return true;
  }

  // Returns false if the lengths of any two ranks differ.
  [[nodiscard]] bool sum_of_hosts(std::span<double> piece, std::size_t length) {
    // A host whose own ranks differ sends NaN.
    const double own_length =
        lengths_differ() ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(length);
    message_.resize(piece.size() + kLengthFields);
    const auto sum = std::span(message_).first(piece.size());
    const auto trailer = std::span(message_).last(kLengthFields);
    add_slots(sum);
    write_length(trailer, own_length);
    const bool agree = all_reduce_between() && lengths_agree(trailer, own_length, between_->size());
    if (agree) std::ranges::copy(sum, piece.begin());
    return agree;
  }

  // Returns false if the lengths of the pieces differ.
  [[nodiscard]] bool all_reduce_between() {
    try {
      between_->all_reduce_sum(message_);
      return true;
    } catch (const MismatchError&) {
      return false;
    } catch (const TimeoutError& error) {
      end_with<TimeoutError>(cause_of(error.what()));
    } catch (const CommunicationError& error) {
      end_with<CommunicationError>(cause_of(error.what()));
    } catch (const Error& error) {
      record_failure(cause_of(error.what()));
      throw;
    } catch (...) {
      record_failure(name() + " was interrupted while it waited");
      throw;
    }
  }

  // The cause in the text of an error, if another leader has reported one. In any other error the
  // ranks are numbered within the group of leaders, so the result lists the leaders.
  [[nodiscard]] std::string cause_of(const std::string& text) const {
    const std::string prefix = describe("");
    const std::size_t found = text.find(prefix);
    if (found != std::string::npos) return text.substr(found + prefix.size());
    return name() + " among the first " + list_of_ranks(leaders_) + " of the hosts: " + text;
  }

  // Collective: sums a vector of the same length on every rank.
  [[nodiscard]] std::vector<double> different_lengths(std::size_t own) override {
    std::vector<double> lengths = row_to_gather(rank(), size(), {static_cast<double>(own)});
    if (sum(lengths)) return lengths;
    throw CommunicationError(
        describe("ranks that passed different lengths do not agree on the number of ranks"));
  }

  // Call it after the group has failed.
  void notify_other_hosts() noexcept {
    try {
      const std::string text = describe(failure());
      if (between_ && leads()) between_->fail(text);
      whole_->fail(text);              // peers may be in a split
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
      // No memory for the text: the peers throw at their time limit.
    }
  }

  std::unique_ptr<Communicator> whole_;
  std::vector<int> leaders_;
  std::unique_ptr<Communicator> between_;  // of the leaders
  std::vector<double> message_;            // of a leader, to the other leaders
};

}  // namespace

std::unique_ptr<Communicator> make_two_level_communicator(std::unique_ptr<Communicator> whole,
                                                          const Hosts& hosts) {
  return std::make_unique<TwoLevelCommunicator>(std::move(whole), hosts);
}

}  // namespace normscope
