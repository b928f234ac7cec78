// SPDX-License-Identifier: Apache-2.0
#include "tests/torch/nccl_of_torch.h"

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace normscope::testing {
namespace {

constexpr c10::DeviceType kType = kDeviceOfNccl;

// ---- Streams and events ------------------------------------------------------------------------

class StreamOfRank {
 public:
  StreamOfRank() : thread_([this](const std::stop_token& stop) { run(stop); }) {}

  void push(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    ++queued_;
    changed_.notify_all();
  }
  std::int64_t queued() {
    const std::lock_guard lock(mutex_);
    return queued_;
  }
  bool has_ended(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    return ended_ >= number;
  }
  void synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ended_ == queued_; });
  }

 private:
  void run(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (changed_.wait(lock, stop, [&] { return !work_.empty(); })) {
      const std::function<void()> work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      work();
      lock.lock();
      ++ended_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<std::function<void()>> work_;
  std::int64_t queued_ = 0;
  std::int64_t ended_ = 0;
  std::jthread thread_;
};

// nullptr in threads that have queued nothing. Events may be asked for after the thread has ended.
thread_local std::shared_ptr<StreamOfRank> stream_of_thread;
StreamOfRank& current_stream() {
  if (!stream_of_thread) stream_of_thread = std::make_shared<StreamOfRank>();
  return *stream_of_thread;
}

struct Event {
  std::shared_ptr<StreamOfRank> stream;
  std::int64_t number = 0;
};

thread_local bool has_relaxed_mode = false;
std::atomic<bool> asked_in_default_mode = false;

thread_local c10::Device current_device(kType, 0);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return std::exchange(current_device, device);
  }
  c10::Device getDevice() const override { return current_device; }
  void setDevice(c10::Device device) const override { current_device = device; }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device; }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, 0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override { return next; }
  void* getStreamNativeHandle(c10::Stream /*stream*/) const override { return &current_stream(); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device,
              c10::EventFlag /*flag*/) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "an event of another device");
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {stream_of_thread, current_stream().queued()};
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  bool queryEvent(void* event) const override {
    if (!stream_of_thread && !has_relaxed_mode) asked_in_default_mode = true;
    const auto& asked = *static_cast<Event*>(event);
    return asked.stream->has_ended(asked.number);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  at::Device getDeviceFromPtr(void* /*data*/) const override { return current_device; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
};

[[maybe_unused]] const bool kHasHooks = [] {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

// ---- NCCL's answers ----------------------------------------------------------------------------

constexpr int kInProgress = 7;

at::ScalarType type_of(int nccl_type) {
  switch (nccl_type) {
    case 2: return at::kInt;
    case 4: return at::kLong;
    case 7: return at::kFloat;
    default: return at::kDouble;
  }
}

at::Tensor on_host(const void* data, std::size_t count, int nccl_type) {
  return at::from_blob(const_cast<void*>(data), {static_cast<std::int64_t>(count)},
                       at::TensorOptions().dtype(type_of(nccl_type)));
}

}  // namespace

AnswersOfNccl& answers_of_nccl() {
  static thread_local AnswersOfNccl answers;
  return answers;
}

bool has_asked_in_default_mode() { return asked_in_default_mode; }

void synchronize_stream() { current_stream().synchronize(); }

}  // namespace normscope::testing

namespace c10d {

using normscope::testing::answers_of_nccl;
using normscope::testing::StreamOfRank;

// Leaves every rank's numbers in the store, where the others wait for them.
struct ProcessGroupNCCL::Communicator {
  c10::intrusive_ptr<Store> store;
  int rank;
  int size;
  std::atomic<bool>& is_aborted;
  int messages = 0;

  // `own` of all ranks, or nothing if the communicator is aborted.
  std::vector<at::Tensor> gather(const at::Tensor& own) {
    const std::string name = "message " + std::to_string(messages++) + "/";
    const auto* const bytes = static_cast<const std::uint8_t*>(own.const_data_ptr());
    store->set(name + std::to_string(rank), std::vector<std::uint8_t>(bytes, bytes + own.nbytes()));
    std::vector<at::Tensor> all;
    for (int other = 0; other < size; ++other) {
      const std::string key = name + std::to_string(other);
      while (!store->check({key})) {
        if (is_aborted) return {};
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      const std::vector<std::uint8_t> theirs = store->get(key);
      all.push_back(at::empty_like(own));
      std::memcpy(all.back().mutable_data_ptr(), theirs.data(), theirs.size());
    }
    return all;
  }

  void sum(const at::Tensor& own) {
    const std::vector<at::Tensor> all = gather(own);
    if (!all.empty()) own.copy_(at::sum(at::stack(all), 0));
  }
};

ProcessGroupNCCL::ProcessGroupNCCL(const c10::intrusive_ptr<Store>& store, int rank, int size)
    : Backend(rank, size),
      communicator_(std::make_unique<Communicator>(store, rank, size, is_aborted)) {}

ProcessGroupNCCL::~ProcessGroupNCCL() = default;

c10::intrusive_ptr<Work> ProcessGroupNCCL::allreduce(std::vector<at::Tensor>& tensors,
                                                     const AllreduceOptions& /*options*/) {
  ++sums;
  is_connected_ = true;
  const at::Tensor& tensor = tensors.front();
  communicator_->sum(at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(),
                                   at::TensorOptions().dtype(tensor.dtype())));
  return nullptr;
}

void ProcessGroupNCCL::abort() { is_aborted = true; }

std::int64_t ProcessGroupNCCL::getCommPtr() {
  return is_connected_ ? reinterpret_cast<std::int64_t>(communicator_.get()) : 0;
}

struct FunctionsOfNccl {
  using Communicator = ProcessGroupNCCL::Communicator;

  template <class Work>
  static int queue(void* stream, const Work& work) {
    auto& answers = answers_of_nccl();
    ++answers.calls;
    if (answers.result != 0 && answers.result != normscope::testing::kInProgress) {
      return answers.result;
    }
    static_cast<StreamOfRank*>(stream)->push(work);
    return answers.result;
  }
};

}  // namespace c10d

// NOLINTBEGIN(readability-identifier-naming): the names of NCCL and CUDA
using c10d::answers_of_nccl;

extern "C" {

using Nccl = c10d::FunctionsOfNccl;

int ncclAllReduce(const void* own, void* sum, std::size_t count, int type, int /*op*/,
                  void* communicator, void* stream) {
  return Nccl::queue(stream, [=] {
    const at::Tensor message = normscope::testing::on_host(sum, count, type);
    if (own != sum) message.copy_(normscope::testing::on_host(own, count, type));
    static_cast<Nccl::Communicator*>(communicator)->sum(message);
  });
}

int ncclAllGather(const void* own, void* all, std::size_t count, int type, void* communicator,
                  void* stream) {
  return Nccl::queue(stream, [=] {
    const auto rows = static_cast<Nccl::Communicator*>(communicator)
                          ->gather(normscope::testing::on_host(own, count, type));
    auto* to = static_cast<std::byte*>(all);
    for (const at::Tensor& row : rows) {
      std::memcpy(to, row.const_data_ptr(), row.nbytes());
      to += row.nbytes();
    }
  });
}

int ncclCommGetAsyncError(void* /*communicator*/, int* error) {
  *error = answers_of_nccl().async_error;
  return 0;
}

const char* ncclGetErrorString(int /*error*/) { return "unhandled system error"; }

int cudaStreamIsCapturing(void* /*stream*/, int* status) {
  *status = answers_of_nccl().is_capturing ? 1 : 0;
  return 0;
}

int cudaThreadExchangeStreamCaptureMode(int* mode) {
  normscope::testing::has_relaxed_mode = *mode == 2;
  return 0;
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming)
