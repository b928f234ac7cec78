// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/two_level_communicator.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "normscope/comm/describe.h"
#include "normscope/comm/rank_names.h"
#include "normscope/comm/slot_group.h"
#include "normscope/core/error.h"

namespace normscope {
namespace {

// The leader is the first rank of a host's memory.
constexpr int kLeader = 0;

// What a leader announces as the length of its message if some ranks, of whatever host, came with
// another one than the rest.
constexpr std::int64_t kLengthsDiffer = -1;

// A message between hosts ends with its length and the square of that. Their sums over H hosts are
// H * length and H * length^2 only if all hosts have this length; both are exact while
// H * length^2 <= 2^53. A host whose own ranks differ sends NaN, which no length equals.
constexpr std::size_t kTrailer = 2;

int place_of(int rank, const std::vector<int>& ranks) {
  return static_cast<int>(std::ranges::find(ranks, rank) - ranks.begin());
}

// In an exchange every rank of a host writes its values to its slot. The leader adds the slots,
// adds the hosts' sums with the other leaders, and puts the result into its own slot, where the
// others read it: each rank waits once, for the leader, and the leader for them.
//
// Why a slot may be written again two epochs later: the leader announces an epoch after all have
// announced it and it has read their slots; and a rank announces an epoch after it has read the
// leader's slot of the one before.
class TwoLevelCommunicator final : public Communicator {
 public:
  TwoLevelCommunicator(std::unique_ptr<Communicator> whole, const Hosts& hosts)
      : whole_(std::move(whole)),
        leaders_(hosts.leaders),
        transport_("shared memory and " + std::string(whole_->transport())),
        host_(SlotMemory(hosts.memory->memory()), place_of(whole_->rank(), hosts.members),
              transport_, RankNames(hosts.members, whole_->size())) {
    if (CallBoard* const board = whole_->calls()) {
      host_.show_calls_on(
          {.board = *board, .ranks = numbers_of_ranks(whole_->size()), .are_all = false});
    }
    // The others are alone in their parts, which costs them nothing.
    between_ = whole_->split(leads() ? 0 : 1 + whole_->rank(), whole_->rank());
  }

  ~TwoLevelCommunicator() override = default;

  [[nodiscard]] int rank() const noexcept override { return whole_->rank(); }
  [[nodiscard]] int size() const noexcept override { return whole_->size(); }
  [[nodiscard]] std::string_view transport() const noexcept override { return transport_; }
  [[nodiscard]] bool compares_lengths() const noexcept override {
    return whole_->compares_lengths();
  }
  [[nodiscard]] CallBoard* calls() noexcept override { return &host_.calls(); }

  void all_reduce_sum(std::span<double> values, Stream stream) override {
    check_host_memory(*this, stream);
    host_.throw_if_forked();
    try {
      host_.throw_if_failed();
      if (!sum(values)) throw_lengths_differ(values.size());
    } catch (const MismatchError&) {
      throw;  // of every rank
    } catch (...) {
      tell_other_hosts();
      throw;
    }
  }

  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override {
    host_.throw_if_forked();
    host_.throw_if_failed();
    return over_hosts(whole_->split(color, key), host_.options().time_limit);
  }

  // Ranks of this host throw at once. Those of others do as soon as this host's leader comes to an
  // exchange, or at once if this is the leader.
  void fail(std::string_view reason) noexcept override {
    if (!host_.is_at_home()) return;
    host_.fail(reason);
    tell_other_hosts();
  }

 private:
  [[nodiscard]] bool leads() const noexcept { return host_.rank() == kLeader; }

  // Returns false if the ranks' lengths differ.
  [[nodiscard]] bool sum(std::span<double> values) {
    const auto longest = static_cast<std::size_t>(host_.options().slot_length);
    std::size_t begin = 0;
    do {
      const auto piece = values.subspan(begin, std::min(values.size() - begin, longest));
      host_.begin_epoch(values.size());
      std::ranges::copy(piece, host_.slot(host_.rank()));
      if (!(leads() ? sum_and_publish(piece, values.size()) : follow(piece))) return false;
      begin += piece.size();
    } while (begin < values.size());
    return true;
  }

  [[nodiscard]] bool sum_and_publish(std::span<double> piece, std::size_t length) {
    host_.show_arrival();
    host_.wait_for({.first = kLeader + 1, .last = host_.size()});
    const bool agree = sum_of_hosts(piece, length);
    if (agree) {
      std::ranges::copy(piece, host_.slot(kLeader));
    } else {
      host_.length(kLeader) = kLengthsDiffer;
    }
    host_.announce();
    return agree;
  }

  [[nodiscard]] bool follow(std::span<double> piece) {
    host_.announce();
    host_.wait_for({.first = kLeader, .last = kLeader + 1});
    if (host_.length(kLeader) == kLengthsDiffer) return false;
    std::copy_n(host_.slot(kLeader), piece.size(), piece.begin());
    return true;
  }

  // Returns false if the lengths of any two ranks differ.
  [[nodiscard]] bool sum_of_hosts(std::span<double> piece, std::size_t length) {
    const double own_length = host_.lengths_differ() ? std::numeric_limits<double>::quiet_NaN()
                                                     : static_cast<double>(length);
    message_.resize(piece.size() + kTrailer);
    const auto sum = std::span(message_).first(piece.size());
    const auto trailer = std::span(message_).last(kTrailer);
    host_.add_slots(sum);
    trailer[0] = own_length;
    trailer[1] = own_length * own_length;
    if (!all_reduce_between()) return false;
    const auto hosts = static_cast<double>(between_->size());
    if (trailer[0] != hosts * own_length || trailer[1] != hosts * (own_length * own_length)) {
      return false;
    }
    std::ranges::copy(sum, piece.begin());
    return true;
  }

  // Returns false if the lengths of pieces differ.
  [[nodiscard]] bool all_reduce_between() {
    try {
      between_->all_reduce_sum(message_);
      return true;
    } catch (const MismatchError&) {
      return false;
    } catch (const TimeoutError& error) {
      host_.end_with<TimeoutError>(cause_of(error.what()));
    } catch (const CommunicationError& error) {
      host_.end_with<CommunicationError>(cause_of(error.what()));
    } catch (const Error& error) {
      host_.record_failure(cause_of(error.what()));
      throw;
    } catch (...) {
      host_.record_failure(host_.name() + " was interrupted while it waited");
      throw;
    }
  }

  // A leader that fails tells the others its text in theirs. What else they meet is in terms of
  // their own group.
  [[nodiscard]] std::string cause_of(const std::string& text) const {
    const std::string prefix = host_.describe("");
    const std::size_t found = text.find(prefix);
    if (found != std::string::npos) return text.substr(found + prefix.size());
    return host_.name() + " among the first " + list_of_ranks(leaders_) + " of the hosts: " + text;
  }

  // Every rank comes to this with a vector of one length.
  [[noreturn]] void throw_lengths_differ(std::size_t length) {
    std::vector<double> lengths(static_cast<std::size_t>(size()));
    lengths[static_cast<std::size_t>(rank())] = static_cast<double>(length);
    if (!sum(lengths)) {
      throw CommunicationError(
          host_.describe("ranks that came with different lengths do not agree "
                         "on how many ranks there are"));
    }
    throw MismatchError(
        host_.describe(text_of_different_lengths({lengths.begin(), lengths.end()})));
  }

  // The group has failed.
  void tell_other_hosts() noexcept {
    try {
      const std::string text = host_.describe(host_.failure());
      if (between_ && leads()) between_->fail(text);
      whole_->fail(text);              // peers may be in a split
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
      // No memory for the text: the peers find out at their time limit.
    }
  }

  std::unique_ptr<Communicator> whole_;
  std::vector<int> leaders_;
  std::string transport_;
  SlotGroup host_;
  std::unique_ptr<Communicator> between_;  // of the leaders
  std::vector<double> message_;            // of a leader, to the others
};

}  // namespace

std::unique_ptr<Communicator> make_two_level_communicator(std::unique_ptr<Communicator> whole,
                                                          const Hosts& hosts) {
  return std::make_unique<TwoLevelCommunicator>(std::move(whole), hosts);
}

}  // namespace normscope
