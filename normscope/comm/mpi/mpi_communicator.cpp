// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/mpi/mpi_communicator.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <sched.h>

#include "normscope/comm/call_observer.h"
#include "normscope/comm/describe.h"
#include "normscope/comm/exchange_options.h"
#include "normscope/core/error.h"
#include "normscope/core/text.h"

namespace normscope {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// A peer on another core arrives within microseconds. A longer spin only blocks peers on this core.
constexpr int kSpins = 16;

// A longer wait leaves the core to ranks that have work to do, but must call MPI from time to time:
// MPI only makes progress inside its calls.
constexpr std::chrono::microseconds kYieldTime{200};
constexpr std::chrono::microseconds kSleep{20};

constexpr milliseconds kBetweenObservations{100};

// float64 numbers in one MPI_Iallreduce: 8 MiB. MPI counts in int, and the numbers are copied.
constexpr std::size_t kPieceLength = std::size_t{1} << 20;

// Point-to-point messages next to the sums. Shortly before its time limit, a rank asks its peers
// whether they have reached the same exchange. The error can then name those that have not.
enum Tag { kHaveYouCome, kHaveCome, kFailed };
constexpr milliseconds kTimeForAnswers{500};

bool is_finalized() noexcept {
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized != 0;
}

// Why this thread must not call MPI; empty if it may.
std::string obstacle_of_thread() {
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  if (level >= MPI_THREAD_SERIALIZED) return "";
  if (level < MPI_THREAD_FUNNELED) {
    return "expected MPI to be initialized with MPI_THREAD_FUNNELED or more, got "
           "MPI_THREAD_SINGLE; call MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided) "
           "in place of MPI_Init";
  }
  int is_main = 0;
  MPI_Is_thread_main(&is_main);
  return is_main != 0 ? ""
                      : "expected a call from the thread that initialized MPI, with "
                        "MPI_THREAD_FUNNELED, got one from another thread; initialize with "
                        "MPI_THREAD_SERIALIZED to allow it";
}

bool may_call_mpi() { return !is_finalized() && obstacle_of_thread().empty(); }

// MPI's text for an error code.
std::string text_of_code(int code) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  return {text, static_cast<std::size_t>(length)};
}

// Keeps `memory` until the process ends, because MPI may still use it.
void keep_for_mpi(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<std::shared_ptr<void>>;
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(memory));
}

void check_arguments(MPI_Comm ranks, milliseconds time_limit) {
  const auto refuse = [](const std::string& why) {
    throw ArgumentError("make_mpi_communicator: " + why);
  };
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized == 0) {
    refuse("expected MPI to be initialized, by MPI_Init_thread with MPI_THREAD_FUNNELED or more");
  }
  if (is_finalized()) refuse("expected MPI to be in use, but it has been finalized");
  if (const std::string obstacle = obstacle_of_thread(); !obstacle.empty()) refuse(obstacle);
  if (ranks == MPI_COMM_NULL) refuse("ranks: expected an MPI communicator, got MPI_COMM_NULL");
  int is_inter = 0;
  MPI_Comm_test_inter(ranks, &is_inter);
  if (is_inter != 0) refuse("ranks: expected one group of ranks, got an inter-communicator");
  if (time_limit <= milliseconds::zero()) {
    refuse("time_limit: expected more than 0 ms, got " + std::to_string(time_limit.count()) +
           " ms");
  }
}

// Makes calls on the caller's communicator return errors for the lifetime of this object.
class ReturnsErrors {
 public:
  explicit ReturnsErrors(MPI_Comm comm) : comm_(comm) {
    MPI_Comm_get_errhandler(comm_, &before_);
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  }
  ReturnsErrors(const ReturnsErrors&) = delete;
  ReturnsErrors& operator=(const ReturnsErrors&) = delete;
  ~ReturnsErrors() {
    MPI_Comm_set_errhandler(comm_, before_);
    MPI_Errhandler_free(&before_);
  }

 private:
  MPI_Comm comm_;
  MPI_Errhandler before_ = MPI_ERRHANDLER_NULL;
};

// Memory that MPI reads and writes between calls.
struct Traffic {
  std::vector<double> sum;
  MPI_Request request = MPI_REQUEST_NULL;
  std::list<std::string> sent;  // texts sent to single peers
};

class MpiCommunicator final : public Communicator {
 public:
  // Takes ownership of `own`, whose error handler is MPI_ERRORS_RETURN.
  MpiCommunicator(MPI_Comm own, milliseconds time_limit)
      : own_(own), time_limit_(time_limit), traffic_(std::make_unique<Traffic>()) {
    MPI_Comm_rank(own_, &rank_);
    MPI_Comm_size(own_, &size_);
    arrivals_.resize(static_cast<std::size_t>(size_));
  }

  ~MpiCommunicator() override {
    if (request_) fail(*request_);
    // MPI cannot cancel an exchange, and a text may still be on its way to a peer. In both cases
    // the memory must stay. MPI_Comm_free is collective, but does not wait in practice.
    const bool is_quiet = failure_.empty() && !has_talked_;
    if (!is_quiet) {
      keep_for_mpi(std::move(traffic_));
    } else if (may_call_mpi()) {
      MPI_Comm_free(&own_);
    }
  }

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return size_; }
  [[nodiscard]] std::string_view transport() const noexcept override { return "mpi"; }

  // If the counts differ between ranks, MPI's behaviour is undefined.
  [[nodiscard]] bool compares_lengths() const noexcept override { return false; }

  void all_reduce_sum(std::span<double> values, Stream stream) override {
    check_host_memory(*this, stream);
    add(values);
    notify_as_requested();  // a fail() may have come after the last piece
  }

  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override {
    const int leader = members_of_part(*this, color, key).front();
    // MPI_Comm_split has no time limit. It does not need one: all ranks have just arrived here.
    MPI_Comm part = MPI_COMM_NULL;
    check(MPI_Comm_split(own_, leader, key, &part), "MPI_Comm_split");
    check(MPI_Comm_set_errhandler(part, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    return std::make_unique<MpiCommunicator>(part, time_limit_);
  }

  // MPI may take calls of one thread only. The peers are therefore notified by the thread that is
  // in an exchange, or, if this thread must not call MPI, by the next one that uses this object.
  void fail(std::string_view reason) noexcept override {
    try {
      std::string kept(shortened(reason, kReasonBytes));
      {
        const std::lock_guard lock(of_request_);
        if (!request_) request_ = std::move(kept);
      }
      notify_as_requested();
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
      // No memory for the reason; the peers throw at their time limit.
    }
  }

 private:
  void add(std::span<double> values) {
    const std::lock_guard busy(busy_);
    throw_if_unusable();
    std::size_t begin = 0;
    do {
      const auto piece = values.subspan(begin, std::min(values.size() - begin, kPieceLength));
      add_piece(piece);
      begin += piece.size();
    } while (begin < values.size());
  }

  void add_piece(std::span<double> values) {
    const ObservedWait observed;  // first, because MPI cannot cancel the sum if this throws
    // At least one number: an empty sum would not synchronize the ranks.
    traffic_->sum.assign(std::max<std::size_t>(values.size(), 1), 0.0);
    std::ranges::copy(values, traffic_->sum.begin());
    ++exchanges_;
    check(MPI_Iallreduce(MPI_IN_PLACE, traffic_->sum.data(), static_cast<int>(traffic_->sum.size()),
                         MPI_DOUBLE, MPI_SUM, own_, &traffic_->request),
          "MPI_Iallreduce");
    wait();
    std::copy_n(traffic_->sum.begin(), values.size(), values.begin());
  }

  // Waits until the exchange is complete.
  void wait() {
    const Clock::time_point start = Clock::now();
    Clock::duration next_observation = kBetweenObservations;
    bool has_asked = false;
    for (int turn = 0;; ++turn) {
      int done = 0;
      check(MPI_Test(&traffic_->request, &done, MPI_STATUS_IGNORE), "MPI_Test");
      if (done != 0) return;
      if (turn < kSpins) continue;
      listen();
      const Clock::duration waited = Clock::now() - start;
      if (waited >= time_limit_) give_up(waited);
      if (!has_asked && waited >= time_limit_ - std::min(kTimeForAnswers, time_limit_ / 2)) {
        notify_peers(kHaveYouCome, std::to_string(exchanges_));
        has_asked = true;
      }
      if (waited >= next_observation) {
        notify_observer(
            waited, [] { return "this rank waits for the others"; },
            [this] { fail_with(own_name() + " was interrupted while it waited"); });
        next_observation += kBetweenObservations;
      }
      if (waited < kYieldTime) {
        sched_yield();
      } else {
        std::this_thread::sleep_for(kSleep);
      }
    }
  }

  // Receives and handles the peers' point-to-point messages, and what fail() has left to do.
  void listen() {
    if (has_failed_as_requested()) throw CommunicationError(describe(failure_));
    for (;;) {
      int found = 0;
      MPI_Status status;
      check(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, own_, &found, &status), "MPI_Iprobe");
      if (found == 0) return;
      char text[kReasonBytes];
      int length = 0;
      check(
          MPI_Recv(text, sizeof(text), MPI_CHAR, status.MPI_SOURCE, status.MPI_TAG, own_, &status),
          "MPI_Recv");
      check(MPI_Get_count(&status, MPI_CHAR, &length), "MPI_Get_count");
      take(status, {text, static_cast<std::size_t>(length)});
    }
  }

  // What fail() asked for, if this thread can do it. A thread that has been using this object
  // meanwhile calls this afterwards.
  void notify_as_requested() {
    const std::unique_lock busy(busy_, std::try_to_lock);
    if (busy && may_call_mpi()) (void)has_failed_as_requested();
  }

  bool has_failed_as_requested() {
    const std::lock_guard lock(of_request_);
    if (request_) fail_with(own_name() + " failed: " + *request_);
    return request_.has_value();
  }

  void take(const MPI_Status& status, const std::string& text) {
    has_talked_ = true;
    if (status.MPI_TAG == kFailed) {
      failure_ = as_utf8(text);
      throw CommunicationError(describe(failure_));
    }
    const std::int64_t exchange = std::stoll(text);
    if (status.MPI_TAG == kHaveCome) {
      arrivals_[static_cast<std::size_t>(status.MPI_SOURCE)] = exchange;
    } else if (exchange <= exchanges_) {
      notify(status.MPI_SOURCE, kHaveCome, traffic_->sent.emplace_back(text));
    }
  }

  [[noreturn]] void give_up(Clock::duration waited) {
    std::vector<int> missing;
    for (int peer = 0; peer < size_; ++peer) {
      const bool has_come = arrivals_[static_cast<std::size_t>(peer)] == exchanges_;
      if (peer != rank_ && !has_come) missing.push_back(peer);
    }
    const std::string awaited =
        missing.empty() ? "a sum that all ranks have reached" : list_of_ranks(missing);
    fail_with(own_name() + " waited " + in_seconds(waited) + " for " + awaited);
    throw TimeoutError(describe(failure_));
  }

  void throw_if_unusable() {
    if (!failure_.empty()) throw CommunicationError(describe(failure_));
    if (is_finalized()) throw CommunicationError(describe("MPI has been finalized"));
    if (const std::string obstacle = obstacle_of_thread(); !obstacle.empty()) {
      throw ArgumentError(describe(obstacle));
    }
    listen();
  }

  void check(int code, const char* call) {
    if (code == MPI_SUCCESS) return;
    fail_with(own_name() + " failed: " + call + ": " + text_of_code(code));
    throw CommunicationError(describe(failure_));
  }

  // The first failure wins.
  void fail_with(const std::string& text) {
    if (!failure_.empty()) return;
    failure_ = shortened(text, kReasonBytes);
    if (may_call_mpi()) notify_peers(kFailed, failure_);
  }

  void notify_peers(Tag tag, std::string text) {
    const std::string& kept = traffic_->sent.emplace_back(std::move(text));
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) notify(peer, tag, kept);
    }
  }

  // The request is freed, so MPI does not say when it is done with the text: it must be kept.
  void notify(int peer, Tag tag, const std::string& text) {
    has_talked_ = true;
    MPI_Request request = MPI_REQUEST_NULL;
    const int code =
        MPI_Isend(text.data(), static_cast<int>(text.size()), MPI_CHAR, peer, tag, own_, &request);
    if (code == MPI_SUCCESS) MPI_Request_free(&request);
  }

  [[nodiscard]] static std::string describe(std::string_view text) {
    return "mpi: " + std::string(text);
  }

  [[nodiscard]] std::string own_name() const { return name_of_rank(rank_, size_); }

  MPI_Comm own_;
  milliseconds time_limit_;
  std::unique_ptr<Traffic> traffic_;
  int rank_ = 0;
  int size_ = 0;
  std::int64_t exchanges_ = 0;          // that this rank has reached
  std::vector<std::int64_t> arrivals_;  // the last exchange that each peer has reported
  bool has_talked_ = false;             // has sent or received point-to-point messages
  std::string failure_;                 // the first one; empty: none

  std::mutex busy_;                     // held during an exchange; guards the members above
  std::mutex of_request_;               // guards the next one
  std::optional<std::string> request_;  // the reason of a fail() that could not notify the peers
};

// MPI_Comm_dup with a time limit.
MPI_Comm duplicate(MPI_Comm ranks, milliseconds time_limit) {
  // MPI writes to it when the other ranks arrive, perhaps after this rank has given up.
  auto own = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
  const auto check = [](int code, const char* call) {
    if (code == MPI_SUCCESS) return;
    throw CommunicationError(std::string("mpi: ") + call + ": " + text_of_code(code));
  };
  const ReturnsErrors returns_errors(ranks);
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Comm_idup(ranks, own.get(), &request), "MPI_Comm_idup");
  const Clock::time_point start = Clock::now();
  for (;;) {
    int done = 0;
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done != 0) break;
    const Clock::duration waited = Clock::now() - start;
    if (waited >= time_limit) {
      keep_for_mpi(std::move(own));
      throw TimeoutError("mpi: this rank waited " + in_seconds(waited) +
                         " for the other ranks to create the group");
    }
    sched_yield();
  }
  check(MPI_Comm_set_errhandler(*own, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return *own;
}

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm ranks, milliseconds time_limit) {
  check_arguments(ranks, time_limit);
  time_limit = std::min(time_limit, kLongestTimeLimit);
  return std::make_unique<MpiCommunicator>(duplicate(ranks, time_limit), time_limit);
}

}  // namespace normscope
