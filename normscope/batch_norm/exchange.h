// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "normscope/comm/communicator.h"
#include "normscope/core/attributes.h"
#include "normscope/core/error.h"
#include "normscope/core/header.h"
#include "normscope/core/message_view.h"

namespace normscope NORMSCOPE_EXPORT {

// Why the ranks of a group exchange. kAgreement: to find out who shares statistics;
// CallLabel::layer is then quoted, but not compared. kParameters: to exchange numbers of a whole
// module; CallLabel::layer then names the operation, and CallLabel::channels is the number of
// numbers.
enum class Direction { kForward, kBackward, kDoubleBackward, kAgreement, kParameters };

// For example "forward".
[[nodiscard]] std::string_view name_of(Direction direction) noexcept;

// Whether this rank's forward will be followed by a backward. If ranks disagreed about this, the
// backward would hang. All of them therefore throw in forward.
enum class BackwardNeeded { kNo, kYes };

// The name of this library's kernels. Ranks with other kernels send other sums.
inline constexpr std::string_view kOwnKernels = "normscope";

// In place of a momentum.
inline constexpr double kCumulativeAverage = std::numeric_limits<double>::quiet_NaN();

// A rank's call that exchanges with its group. Compared across ranks, and quoted in errors.
struct CallLabel {
  std::string_view layer;  // qualified name; empty: identified by shape and call number only
  std::string_view scope;
  std::string_view kernels = kOwnKernels;  // whose kernels compute the sums
  Direction direction = Direction::kForward;
  std::int64_t channels = 0;
  // Of the layer's input. NOLINTNEXTLINE(readability-redundant-member-init): labels may omit it.
  std::string_view dtype = {};
  BackwardNeeded backward = BackwardNeeded::kYes;
  // For a forward: must agree across ranks for the running statistics to be equal.
  double eps = 0.0;
  double momentum = 0.0;  // or kCumulativeAverage
};

// Whether a group of one rank sends nothing or, for tests, exchanges like several ranks.
enum class WhenAlone { kSkip, kExchange };

struct DeviceReport;

// A group of ranks that share statistics: a communicator, with checks that its messages match. One
// thread at a time uses it.
class Exchange {
 public:
  // `names` are the ranks' numbers in the enclosing group, for errors; none: 0, 1, ... Throws
  // ArgumentError without a communicator, and the errors of check_environment_of().
  explicit Exchange(std::unique_ptr<Communicator> communicator,
                    WhenAlone when_alone = WhenAlone::kSkip, std::vector<int> names = {});

  [[nodiscard]] Communicator& communicator() const noexcept { return *communicator_; }

  // Whether statistics need a message at all.
  [[nodiscard]] bool sends() const noexcept {
    return communicator_->size() > 1 || when_alone_ == WhenAlone::kExchange;
  }

  // Replaces the sums and the count by their totals over the ranks. The message holds the sums,
  // then kHeaderSize doubles, the first of which is the count. Takes one all-reduce. If the
  // transport cannot handle different lengths, a small one precedes it for a layer that is new to
  // the group.
  //
  // If the ranks disagree, throws MismatchError on every rank and says what each rank was doing. If
  // the exchange fails, throws CommunicationError or TimeoutError with the layer, direction and
  // scope.
  void all_reduce(const CallLabel& label, std::span<double> message, Stream stream);

  // A message of a rank that its device sends.
  struct DeviceMessage {
    Header header;
    int call;                 // number for reported_call()
    const PeerMemory* peers;  // in which kernels exchange it; nullptr: all_reduce_on_device() does
  };

  // The same for a message of so many channels in device memory. Does not wait for the device.
  // write() queues on the stream the kernel that writes the message, or that exchanges it. Whatever
  // reads the totals must call ranks_agree(), and report the number of the call if it is false.
  void all_reduce_on_device(const CallLabel& label, double count, const MessageView& message,
                            Stream stream, const std::function<void(const DeviceMessage&)>& write);

  // The same for a message of `bytes` that the caller sends: calls send(this rank's header), and
  // returns the number of the call. The lengths of a label that is new are compared before.
  int exchange_on_device(const CallLabel& label, double count, std::size_t bytes,
                         const std::function<void(const Header&)>& send);

  // Keeps a check of a call whose results are still on their way from a device. It is made at the
  // beginning of later calls, until it returns true or throws.
  void check_later(std::function<bool()> check) { checks_.push_back(std::move(check)); }

  // The `own` numbers of all ranks, one row after the other, with the errors of all_reduce().
  [[nodiscard]] std::vector<double> gather(const CallLabel& label, const std::vector<double>& own);

  // This rank's call that a device reported: "forward of block.bn (...)".
  [[nodiscard]] const std::string& reported_call(int number) const;

  // The number by which errors name a rank of the communicator.
  [[nodiscard]] int name_of_rank(std::size_t rank) const noexcept;

  // For threads that share the exchange: held while one of them uses it.
  [[nodiscard]] std::mutex& mutex() noexcept { return mutex_; }

  // Where a device reports errors; made by the first user on a device.
  [[nodiscard]] std::shared_ptr<DeviceReport>& report() noexcept { return report_; }

  // Notifies the peers that this rank will not come.
  void fail(std::string_view reason) noexcept { communicator_->fail(reason); }

 private:
  template <class Send>
  int compare_and_send(const CallLabel& label, double count, std::size_t bytes,
                       bool compares_lengths, const Send& send);
  void make_checks();
  void compare(std::span<const double> totals) const;
  [[nodiscard]] std::string describe_here(const CallLabel& label) const;
  [[noreturn]] void throw_mismatch(const CallLabel& label);

  std::unique_ptr<Communicator> communicator_;
  WhenAlone when_alone_;
  bool checks_every_call_ = false;
  std::vector<int> names_;
  // Label hash -> number, for the labels that this group has exchanged.
  std::unordered_map<std::uint64_t, int> seen_;
  std::vector<std::string> labels_;  // [number - 1]
  std::int64_t calls_ = 0;
  std::mutex mutex_;
  std::shared_ptr<DeviceReport> report_;
  std::deque<std::function<bool()>> checks_;
};

// Runs this rank's part of a call with its peers, and notifies them if it throws anything: they
// then throw too, instead of waiting for this rank. They are not notified of errors that all ranks
// throw. `exchange` is nullptr if there are no peers.
template <class Call>
void run_or_notify_peers(Exchange* exchange, const Call& call) {
  const auto notify = [&](std::string_view reason) {
    if (exchange != nullptr) exchange->fail(reason);
  };
  try {
    call();
  } catch (const MismatchError&) {
    throw;
  } catch (const OneValueError&) {
    throw;
  } catch (const std::bad_alloc&) {
    notify("it is out of memory");
    throw;
  } catch (const std::exception& error) {
    notify(error.what());
    throw;
  } catch (...) {
    notify("an unknown exception");
    throw;
  }
}

// The messages of this process since it started.
struct CommunicationCounters {
  std::int64_t calls = 0;
  std::int64_t bytes = 0;  // payload of this rank's messages, whatever the transport
  double seconds = 0.0;    // spent in exchanges, including waiting
};
[[nodiscard]] CommunicationCounters communication_counters() noexcept;

}  // namespace normscope
