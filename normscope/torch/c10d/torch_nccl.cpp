// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/c10d/torch_nccl.h"

#include <cstddef>
#include <string_view>
#include <thread>
#include <typeinfo>

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include "normscope/comm/describe.h"
#include "normscope/core/error.h"

namespace normscope::binding {
namespace {

// Of nccl.h and cuda_runtime_api.h, which need not be there when this is compiled.
constexpr int kSuccess = 0;
constexpr int kInProgress = 7;
constexpr int kSum = 0;
constexpr int kNotCapturing = 0;
constexpr int kRelaxed = 2;

std::optional<int> type_in_nccl(at::ScalarType type) {
  switch (type) {
    case at::kInt: return 2;
    case at::kLong: return 4;
    case at::kFloat: return 7;
    case at::kDouble: return 8;
    default: return std::nullopt;
  }
}

struct Functions {
  int (*all_reduce)(const void*, void*, std::size_t, int, int, void*, void*);
  int (*all_gather)(const void*, void*, std::size_t, int, void*, void*);
  int (*get_async_error)(void*, int*);
  const char* (*get_error_string)(int);
  int (*is_capturing)(void*, int*);
  int (*exchange_capture_mode)(int*);
  std::int64_t (*communicator_of)(c10d::Backend*);  // of the current device; 0: none
};

template <class Function>
bool find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

// Looks in torch's library and in those that it depends on.
std::optional<Functions> find_functions() {
  void* const library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr) return std::nullopt;
  Functions found = {};
  const bool are_all_there =
      find(library, "ncclAllReduce", found.all_reduce) &&
      find(library, "ncclAllGather", found.all_gather) &&
      find(library, "ncclCommGetAsyncError", found.get_async_error) &&
      find(library, "ncclGetErrorString", found.get_error_string) &&
      find(library, "cudaStreamIsCapturing", found.is_capturing) &&
      find(library, "cudaThreadExchangeStreamCaptureMode", found.exchange_capture_mode) &&
      // ProcessGroupNCCL::getCommPtr(), whose header needs those of NCCL and CUDA.
      find(library, "_ZN4c10d16ProcessGroupNCCL10getCommPtrEv", found.communicator_of);
  dlclose(library);  // it stays loaded: torch uses it
  return are_all_there ? std::optional(found) : std::nullopt;
}

const std::optional<Functions>& functions() {
  static const std::optional<Functions> found = find_functions();
  return found;
}

}  // namespace

std::optional<TorchNccl> TorchNccl::of(c10d::Backend& backend, c10::Device device) {
  if (!functions()) return std::nullopt;
  // torch wraps it in its debug mode.
  if (std::string_view(typeid(backend).name()) != "N4c10d16ProcessGroupNCCLE") return std::nullopt;
  const std::int64_t communicator = functions()->communicator_of(&backend);
  if (communicator == 0) return std::nullopt;
  const c10::impl::VirtualGuardImpl guard(device.type());
  return TorchNccl(reinterpret_cast<void*>(communicator),  // NOLINT(performance-no-int-to-ptr)
                   guard.getStream(device).native_handle());
}

bool TorchNccl::takes(const at::Tensor& message) {
  return type_in_nccl(message.scalar_type()).has_value();
}

void TorchNccl::all_reduce_sum(const at::Tensor& sum, std::chrono::milliseconds time_limit) const {
  void* const data = sum.mutable_data_ptr();
  const int result = functions()->all_reduce(data, data, static_cast<std::size_t>(sum.numel()),
                                             type_in_nccl(sum.scalar_type()).value(), kSum,
                                             communicator_, stream_);
  settle(result, "ncclAllReduce", time_limit);
}

void TorchNccl::all_gather(const at::Tensor& all, const at::Tensor& own,
                           std::chrono::milliseconds time_limit) const {
  const int result = functions()->all_gather(
      own.const_data_ptr(), all.mutable_data_ptr(), static_cast<std::size_t>(own.numel()),
      type_in_nccl(own.scalar_type()).value(), communicator_, stream_);
  settle(result, "ncclAllGather", time_limit);
}

// A communicator that does not block (TORCH_NCCL_USE_COMM_NONBLOCKING) is still in progress when a
// call returns, and takes no other call until it has completed this one.
void TorchNccl::settle(int result, const char* call, std::chrono::milliseconds time_limit) const {
  const auto deadline = std::chrono::steady_clock::now() + time_limit;
  while (result == kInProgress) {
    if (std::chrono::steady_clock::now() > deadline) {
      throw TimeoutError(std::string(call) + " timed out: waited " + in_seconds(time_limit) +
                         " for the other ranks");
    }
    std::this_thread::yield();
    functions()->get_async_error(communicator_, &result);
  }
  if (result == kSuccess) return;
  throw CommunicationError(std::string(call) + ": " + functions()->get_error_string(result));
}

bool TorchNccl::is_capturing() const {
  int status = kNotCapturing;
  functions()->is_capturing(stream_, &status);
  return status != kNotCapturing;
}

void TorchNccl::allow_captures_of_other_threads() {
  if (!functions()) return;
  int mode = kRelaxed;
  functions()->exchange_capture_mode(&mode);
}

}  // namespace normscope::binding
