// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/nccl/nccl_communicator.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <nccl.h>

#include "normscope/comm/describe.h"
#include "normscope/comm/exchange_options.h"
#include "normscope/comm/nccl/cuda_calls.h"
#include "normscope/comm/nccl/watch.h"
#include "normscope/comm/self_communicator.h"
#include "normscope/core/error.h"
#include "normscope/core/text.h"

namespace normscope {
namespace {

using nccl::check_cuda;
using nccl::CurrentDevice;
using Clock = nccl::Watch::Clock;
using std::chrono::milliseconds;

// Pauses between two checks of NCCL's progress. NCCL may need only microseconds, and a sleep takes
// much longer: the first checks only yield. A long wait sleeps and leaves the core to others.
class Pauses {
 public:
  void next() {
    if (looks_ < kLooksWithoutSleep) {
      ++looks_;
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kSleep);
    }
  }

 private:
  static constexpr int kLooksWithoutSleep = 200;
  static constexpr std::chrono::microseconds kSleep{50};

  int looks_ = 0;
};

std::string reason_of(ncclResult_t result, ncclComm_t comm) {
  std::string text = ncclGetErrorString(result);
  const char* details = comm == nullptr ? nullptr : ncclGetLastError(comm);
  if (details != nullptr && *details != '\0') text += std::string(" (") + details + ")";
  return text;
}

void check_nccl(ncclResult_t result, const char* call, ncclComm_t comm = nullptr) {
  if (result == ncclSuccess || result == ncclInProgress) return;
  throw CommunicationError(std::string("nccl: ") + call + ": " + reason_of(result, comm));
}

// Waits until NCCL, which is in nonblocking mode, has completed `call`.
void settle(ncclComm_t comm, const char* call, milliseconds time_limit) {
  const Clock::time_point deadline = Clock::now() + time_limit;
  ncclResult_t state = ncclInProgress;
  Pauses pauses;
  while (true) {
    check_nccl(ncclCommGetAsyncError(comm, &state), call, comm);
    check_nccl(state, call, comm);
    if (state == ncclSuccess) return;
    if (Clock::now() > deadline) {
      throw TimeoutError(std::string("nccl: ") + call + ": waited " + in_seconds(time_limit) +
                         " for the other ranks");
    }
    pauses.next();
  }
}

// Owns a communicator of NCCL: finalizes and destroys it, or aborts it after a failure.
class OwnedComm {
 public:
  OwnedComm(ncclComm_t comm, milliseconds time_limit) : comm_(comm), time_limit_(time_limit) {}
  OwnedComm(const OwnedComm&) = delete;
  OwnedComm& operator=(const OwnedComm&) = delete;
  ~OwnedComm() {
    try {
      if (is_aborted_) return;
      check_nccl(ncclCommFinalize(comm_), "ncclCommFinalize");
      settle(comm_, "ncclCommFinalize", time_limit_);
      ncclCommDestroy(comm_);
    } catch (const CommunicationError&) {
      ncclCommAbort(comm_);
    }
  }

  [[nodiscard]] ncclComm_t get() const noexcept { return comm_; }

  void abort() noexcept {
    if (!std::exchange(is_aborted_, true)) ncclCommAbort(comm_);
  }

 private:
  ncclComm_t comm_;
  milliseconds time_limit_;
  bool is_aborted_ = false;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(ncclComm_t comm, milliseconds time_limit)
      : comm_(comm, time_limit), time_limit_(time_limit) {
    try {
      settle(comm, "making a communicator", time_limit);
      check_nccl(ncclCommUserRank(comm, &rank_), "ncclCommUserRank", comm);
      check_nccl(ncclCommCount(comm, &size_), "ncclCommCount", comm);
      check_nccl(ncclCommCuDevice(comm, &device_), "ncclCommCuDevice", comm);
    } catch (const CommunicationError&) {
      comm_.abort();
      throw;
    }
  }

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return size_; }
  [[nodiscard]] std::string_view transport() const noexcept override { return "nccl"; }
  [[nodiscard]] bool compares_lengths() const noexcept override { return false; }

  void all_reduce_sum(std::span<double> values, Stream stream) override {
    if (stream.memory == Memory::kHost) {
      sum_through_device(values);
      return;
    }
    const auto on = static_cast<cudaStream_t>(stream.handle);
    guarded([&] {
      enqueue_sum(values.data(), values.size(), on);
      // No time limit for captured work: the caller decides when and how often the graph runs.
      cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
      check_cuda(cudaStreamIsCapturing(on, &capture), "cudaStreamIsCapturing");
      if (capture == cudaStreamCaptureStatusNone) watch().add(on, Clock::now() + time_limit_);
    });
  }

  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override {
    const std::vector<int> members = members_of_part(*this, color, key);
    if (members.size() == 1 && size_ > 1) {
      // A part of one rank needs no NCCL communicator.
      guarded([&] { (void)split_comm(NCCL_SPLIT_NOCOLOR, 0); });
      return make_self_communicator();
    }
    ncclComm_t comm = nullptr;
    // The leader's rank is the color, because NCCL allows no negative colors.
    guarded([&] { comm = split_comm(members.front(), key); });
    return std::make_unique<NcclCommunicator>(comm, time_limit_);
  }

  void fail(std::string_view reason) noexcept override {
    const std::lock_guard lock(mutex_);
    if (failure_ == Failure::kNone) reason_.put("failed: ");
    set_failure(Failure::kOther, reason);
  }

 private:
  enum class Failure { kNone, kTimeout, kOther };

  static constexpr std::string_view kPrefix = "nccl: ";

  // Runs `call`, unless an earlier call has failed. A failure is repeated by every later call.
  template <class Call>
  void guarded(const Call& call) {
    const std::lock_guard lock(mutex_);
    if (failure_ == Failure::kTimeout) throw TimeoutError(text_of_failure());
    if (failure_ == Failure::kOther) throw CommunicationError(text_of_failure());
    try {
      const CurrentDevice current(device_);
      call();
    } catch (const TimeoutError& error) {
      abort(Failure::kTimeout, error.what());
      throw TimeoutError(text_of_failure());
    } catch (const CommunicationError& error) {
      abort(Failure::kOther, error.what());
      throw CommunicationError(text_of_failure());
    }
  }

  void enqueue_sum(void* values, std::size_t size, cudaStream_t stream) {
    check_nccl(ncclAllReduce(values, values, size, ncclFloat64, ncclSum, comm_.get(), stream),
               "ncclAllReduce", comm_.get());
    settle(comm_.get(), "ncclAllReduce", time_limit_);
  }

  void sum_through_device(std::span<double> values) {
    // Freed after guarded(): its abort ends a sum that still uses the memory, else CUDA would wait.
    std::optional<nccl::Staging> staging;
    guarded([&] {
      // At least one number: NCCL skips empty messages, but the ranks must synchronize.
      const std::size_t bytes = std::max<std::size_t>(values.size_bytes(), sizeof(double));
      staging.emplace(bytes);
      const cudaStream_t stream = staging->stream();
      check_cuda(cudaMemcpyAsync(staging->memory(), values.data(), values.size_bytes(),
                                 cudaMemcpyHostToDevice, stream),
                 "cudaMemcpyAsync");
      enqueue_sum(staging->memory(), bytes / sizeof(double), stream);
      wait_for(stream);
      check_cuda(cudaMemcpyAsync(values.data(), staging->memory(), values.size_bytes(),
                                 cudaMemcpyDeviceToHost, stream),
                 "cudaMemcpyAsync");
      check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    });
  }

  void wait_for(cudaStream_t stream) {
    const Clock::time_point deadline = Clock::now() + time_limit_;
    cudaError_t error = cudaSuccess;
    Pauses pauses;
    while ((error = cudaStreamQuery(stream)) == cudaErrorNotReady) {
      ncclResult_t state = ncclSuccess;
      check_nccl(ncclCommGetAsyncError(comm_.get(), &state), "ncclAllReduce", comm_.get());
      check_nccl(state, "ncclAllReduce", comm_.get());
      if (Clock::now() > deadline) throw TimeoutError(text_of_timeout());
      pauses.next();
    }
    check_cuda(error, "cudaStreamQuery");
  }

  [[nodiscard]] ncclComm_t split_comm(int color, int key) {
    ncclComm_t part = nullptr;
    check_nccl(ncclCommSplit(comm_.get(), color, key, &part, nullptr), "ncclCommSplit",
               comm_.get());
    settle(comm_.get(), "ncclCommSplit", time_limit_);
    return part;
  }

  [[nodiscard]] nccl::Watch& watch() {
    if (!watch_) watch_.emplace(device_, [this](bool is_overdue) { look(is_overdue); });
    return *watch_;
  }

  // The watch's regular check.
  void look(bool is_overdue) {
    // If a call holds the lock, that call or the next check finds the error.
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock || failure_ != Failure::kNone) return;
    ncclResult_t state = ncclSuccess;
    ncclCommGetAsyncError(comm_.get(), &state);
    try {
      if (state != ncclSuccess && state != ncclInProgress) {
        abort(Failure::kOther, "nccl: ncclAllReduce: " + reason_of(state, comm_.get()));
      } else if (is_overdue) {
        abort(Failure::kTimeout, text_of_timeout());
      }
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch)
      // No memory for the text: the next check tries again.
    }
  }

  [[nodiscard]] std::string text_of_timeout() const {
    return "nccl: ncclAllReduce: waited " + in_seconds(time_limit_) + " for the other ranks";
  }

  void abort(Failure failure, std::string_view reason) {
    set_failure(failure, reason);
    comm_.abort();
  }

  void set_failure(Failure failure, std::string_view reason) noexcept {
    if (failure_ != Failure::kNone) return;
    failure_ = failure;
    if (reason.starts_with(kPrefix)) reason.remove_prefix(kPrefix.size());
    reason_.put(reason);
  }

  [[nodiscard]] std::string text_of_failure() const {
    return std::string(kPrefix) + name_of_rank(rank_, size_) + ": " + std::string(reason_.view());
  }

  std::mutex mutex_;  // guards the members below: the caller and the watch use them
  OwnedComm comm_;
  milliseconds time_limit_;
  int rank_ = 0;
  int size_ = 0;
  int device_ = 0;
  Failure failure_ = Failure::kNone;
  // In a fixed buffer: the rank may have failed because there is no memory.
  FixedText<kReasonBytes> reason_;
  std::optional<nccl::Watch> watch_;  // last: destroyed before the members that it checks
};

ncclConfig_t config_of_ours() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.maxCTAs = kMostNcclChannels;
  return config;
}

// Returns rank 0's id on every rank.
ncclUniqueId agree_on_unique_id(Communicator& bootstrap) {
  ncclUniqueId id = {};
  try {
    if (bootstrap.rank() == 0) check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
  } catch (const CommunicationError& error) {
    bootstrap.fail(error.what());
    throw;
  }
  std::array<double, sizeof(id.internal)> bytes = {};
  std::ranges::transform(id.internal, bytes.begin(), [](char byte) {
    return static_cast<double>(static_cast<unsigned char>(byte));
  });
  bootstrap.all_reduce_sum(bytes);
  std::ranges::transform(bytes, id.internal, [](double byte) {
    return static_cast<char>(static_cast<unsigned char>(byte));
  });
  return id;
}

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(ncclComm* ranks, milliseconds time_limit) {
  if (ranks == nullptr) {
    throw ArgumentError("ranks: expected an NCCL communicator, got a null pointer");
  }
  time_limit = std::min(time_limit, kLongestTimeLimit);
  int rank = 0;
  check_nccl(ncclCommUserRank(ranks, &rank), "ncclCommUserRank", ranks);
  ncclComm_t duplicate = nullptr;
  ncclConfig_t config = config_of_ours();
  check_nccl(ncclCommSplit(ranks, /*color=*/0, rank, &duplicate, &config), "ncclCommSplit", ranks);
  settle(ranks, "ncclCommSplit", time_limit);
  return std::make_unique<NcclCommunicator>(duplicate, time_limit);
}

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& bootstrap,
                                                     milliseconds time_limit) {
  time_limit = std::min(time_limit, kLongestTimeLimit);
  const ncclUniqueId id = agree_on_unique_id(bootstrap);
  ncclComm_t comm = nullptr;
  ncclConfig_t config = config_of_ours();
  check_nccl(ncclCommInitRankConfig(&comm, bootstrap.size(), id, bootstrap.rank(), &config),
             "ncclCommInitRankConfig");
  return std::make_unique<NcclCommunicator>(comm, time_limit);
}

}  // namespace normscope
