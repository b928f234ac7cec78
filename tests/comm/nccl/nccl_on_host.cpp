// SPDX-License-Identifier: Apache-2.0
#include "tests/comm/nccl/nccl_on_host.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using Work = std::function<void()>;

std::atomic<int> living = 0;
std::atomic<int> most_channels = 0;
thread_local std::shared_ptr<std::atomic<ncclResult_t>> reported =
    std::make_shared<std::atomic<ncclResult_t>>(ncclSuccess);

// The ranks of one communicator. They add one message after the other.
struct Group {
  explicit Group(int ranks) : size(ranks) {}

  // Replaces `values` by the sum over all ranks. Returns early if `is_aborted` becomes true.
  void sum(double* values, std::size_t length, const std::atomic<bool>& is_aborted) {
    std::unique_lock lock(mutex);
    // All ranks must have left the previous round.
    if (!wait(lock, is_aborted, [&] { return leaving == 0; })) return;
    if (arrived++ == 0) total.assign(length, 0.0);
    for (std::size_t i = 0; i < length; ++i) total[i] += values[i];
    if (arrived == size) {
      arrived = 0;
      leaving = size;
      ++round;
      changed.notify_all();
    } else {
      const std::int64_t own = round;
      if (!wait(lock, is_aborted, [&] { return round != own; })) return;
    }
    std::memcpy(values, total.data(), length * sizeof(double));
    if (--leaving == 0) changed.notify_all();
  }

  template <class Condition>
  bool wait(std::unique_lock<std::mutex>& lock, const std::atomic<bool>& is_aborted,
            const Condition& condition) {
    while (!condition()) {
      if (is_aborted) return false;
      changed.wait_for(lock, std::chrono::milliseconds(1));
    }
    return true;
  }

  int size;
  std::mutex mutex;
  std::condition_variable changed;
  int arrived = 0;
  int leaving = 0;
  std::int64_t round = 0;
  std::vector<double> total;
  int joined = 0;
};

std::shared_ptr<Group> group_of(const std::string& id, int size) {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<Group>> groups;
  const std::lock_guard lock(mutex);
  std::shared_ptr<Group>& group = groups[id];
  if (!group) group = std::make_shared<Group>(size);
  std::shared_ptr<Group> found = group;
  if (++found->joined == size) groups.erase(id);
  return found;
}

class Queue {
 public:
  Queue() : thread_([this](const std::stop_token& stop) { run(stop); }) {}

  void push(Work work) {
    if (is_capturing) return;
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }

  [[nodiscard]] bool is_done() {
    const std::lock_guard lock(mutex_);
    return work_.empty();
  }

  void wait() {
    while (!is_done()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  std::atomic<bool> is_capturing = false;
  std::int64_t unsafe_calls_before = 0;  // before the capture

 private:
  void run(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (changed_.wait(lock, stop, [&] { return !work_.empty(); })) {
      const Work work = work_.front();
      lock.unlock();
      work();
      lock.lock();
      work_.pop_front();
    }
  }

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<Work> work_;
  std::jthread thread_;
};

struct Event {
  std::shared_ptr<std::atomic<bool>> is_over = std::make_shared<std::atomic<bool>>(true);
};

thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
std::atomic<std::int64_t> unsafe_calls = 0;

// For functions that CUDA calls potentially unsafe: they invalidate captures of other threads.
void count_unsafe_call() {
  if (capture_mode == cudaStreamCaptureModeGlobal) ++unsafe_calls;
}

Queue& queue_of(cudaStream_t stream) { return *reinterpret_cast<Queue*>(stream); }

}  // namespace

struct ncclComm {
  std::shared_ptr<Group> group;
  int rank;
  std::shared_ptr<std::atomic<ncclResult_t>> state = reported;
  std::shared_ptr<std::atomic<bool>> is_aborted = std::make_shared<std::atomic<bool>>(false);
  std::string id;
  int channels;
  int parts = 0;
};

namespace {

// As many as NCCL uses at most inside a host, unless the program asks for fewer.
constexpr int kUsualChannels = 32;

ncclComm_t make_comm(const std::string& id, int rank, int size, int channels) {
  ++living;
  most_channels = std::max<int>(most_channels, channels);
  return new ncclComm{.group = group_of(id, size), .rank = rank, .id = id, .channels = channels};
}

int channels_of(const ncclConfig_t* config, int otherwise) {
  return config == nullptr || config->maxCTAs == NCCL_CONFIG_UNDEF_INT ? otherwise
                                                                       : config->maxCTAs;
}

void end(ncclComm_t comm) {
  *comm->is_aborted = true;
  --living;
  delete comm;
}

}  // namespace

namespace normscope::nccl_on_host {

Stream::Stream() { cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking); }
Stream::~Stream() { cudaStreamDestroy(stream_); }
void Stream::wait_at(testing::Gate& gate) {
  queue_of(stream_).push([&gate] { gate.wait(); });
}
void Stream::capture() {
  queue_of(stream_).unsafe_calls_before = unsafe_calls;
  queue_of(stream_).is_capturing = true;
}
bool Stream::capture_is_valid() const {
  return queue_of(stream_).unsafe_calls_before == unsafe_calls;
}

void report(ncclResult_t error) { *reported = error; }

int living_communicators() { return living; }

int most_channels_since_last_call() { return most_channels.exchange(0); }

}  // namespace normscope::nccl_on_host

// NOLINTBEGIN(readability-identifier-naming): the names are those of NCCL and CUDA.
extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> made = 0;
  *id = {};
  const std::string text = "group " + std::to_string(made++);
  text.copy(id->internal, sizeof(id->internal) - 1);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  *comm = make_comm(id.internal, rank, size, channels_of(config, kUsualChannels));
  return ncclInProgress;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part,
                           ncclConfig_t* config) {
  // All ranks exchange their colors and keys, as a sum.
  const auto size = static_cast<std::size_t>(comm->group->size);
  std::vector<double> all(2 * size);
  all[2 * static_cast<std::size_t>(comm->rank)] = color;
  all[2 * static_cast<std::size_t>(comm->rank) + 1] = key;
  comm->group->sum(all.data(), all.size(), *comm->is_aborted);
  const std::string id =
      comm->id + "/" + std::to_string(comm->parts++) + "/" + std::to_string(color);
  *part = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  int members = 0;
  int rank = 0;
  for (std::size_t peer = 0; peer < size; ++peer) {
    if (all[2 * peer] != color) continue;
    ++members;
    const auto own = std::pair(static_cast<double>(key), comm->rank);
    if (std::pair(all[2 * peer + 1], static_cast<int>(peer)) < own) ++rank;
  }
  *part = make_comm(id, rank, members, channels_of(config, comm->channels));
  return ncclInProgress;
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t length, ncclDataType_t /*type*/,
                           ncclRedOp_t /*operation*/, ncclComm_t comm, cudaStream_t stream) {
  if (from != to) return ncclInvalidUsage;
  queue_of(stream).push([group = comm->group, is_aborted = comm->is_aborted, to, length] {
    group->sum(static_cast<double*>(to), length, *is_aborted);
  });
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  *state = *comm->state;
  // Every other look finds a call that is still in progress.
  static thread_local bool is_done = true;
  is_done = !is_done;
  if (*state == ncclSuccess && !is_done) *state = ncclInProgress;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t /*comm*/) { return ncclSuccess; }

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  end(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  count_unsafe_call();  // frees device memory
  end(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* size) {
  *size = comm->group->size;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t /*comm*/, int* device) {
  *device = 0;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclRemoteError ? "remote process exited" : "an NCCL error";
}

const char* ncclGetLastError(ncclComm_t /*comm*/) { return ""; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int /*device*/) { return cudaSuccess; }

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = std::calloc(1, bytes);
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind /*kind*/,
                            cudaStream_t stream) {
  queue_of(stream).push([=] {
    if (bytes != 0) std::memcpy(to, from, bytes);
  });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  *stream = reinterpret_cast<cudaStream_t>(new Queue);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  queue_of(stream).wait();
  delete &queue_of(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return queue_of(stream).is_done() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  queue_of(stream).wait();
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status =
      queue_of(stream).is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto& of_event = *reinterpret_cast<Event*>(event);
  of_event.is_over = std::make_shared<std::atomic<bool>>(false);
  queue_of(stream).push([is_over = of_event.is_over] { *is_over = true; });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  count_unsafe_call();
  return *reinterpret_cast<Event*>(event)->is_over ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t /*error*/) { return "a CUDA error"; }

}  // extern "C"
// NOLINTEND(readability-identifier-naming)
