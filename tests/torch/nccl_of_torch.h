// SPDX-License-Identifier: Apache-2.0
//
// What a torch with CUDA contains of NCCL: its backend, and a library "libtorch_cuda.so" with the
// functions of NCCL and of CUDA's runtime that this library needs. The memory of the device is the
// host's. Each thread is a rank, and has a stream that another thread executes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace c10d {

// A torch without CUDA does not define the type.
class __attribute__((visibility("default"))) ProcessGroupNCCL final : public Backend {
 public:
  ProcessGroupNCCL(const c10::intrusive_ptr<Store>& store, int rank, int size);
  ~ProcessGroupNCCL() override;

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }

  // The first of them connects the ranks.
  c10::intrusive_ptr<Work> allreduce(std::vector<at::Tensor>& tensors,
                                     const AllreduceOptions& options) override;
  void abort() override;

  // 0: not connected yet
  std::int64_t getCommPtr();  // NOLINT(readability-identifier-naming): torch's

  int sums = 0;  // by allreduce()
  std::atomic<bool> is_aborted = false;

 private:
  struct Communicator;
  friend struct FunctionsOfNccl;

  c10::intrusive_ptr<Options> options_ = c10::make_intrusive<Options>("nccl");
  std::unique_ptr<Communicator> communicator_;
  bool is_connected_ = false;
};

}  // namespace c10d

namespace normscope::testing {

inline constexpr c10::DeviceType kDeviceOfNccl = c10::DeviceType::PrivateUse1;

// What NCCL and CUDA's runtime answer to this thread.
struct AnswersOfNccl {
  int result = 0;       // of the next call of NCCL
  int async_error = 0;  // afterwards; only if the result is "in progress"
  bool is_capturing = false;
  int calls = 0;  // of NCCL
};
AnswersOfNccl& answers_of_nccl();

// Whether a thread other than that of a rank has asked for events in CUDA's default mode, which
// ends captures of other threads.
bool has_asked_in_default_mode();

// Waits until what this thread has queued has been executed.
void synchronize_stream();

}  // namespace normscope::testing
