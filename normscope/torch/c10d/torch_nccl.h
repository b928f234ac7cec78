// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace normscope::binding {

// The NCCL communicator of torch's backend for the current device, called without c10d. A call by
// c10d makes an object for the work, a future, events, and a record of the call; on the host that
// takes longer than a small layer.
//
// NCCL's functions are those of the library that torch has loaded: another NCCL in the process must
// not use torch's communicators.
class TorchNccl {
 public:
  // For messages on `device`, which is the current one, and on its current stream. nullopt if the
  // backend is not torch's ProcessGroupNCCL, has not connected this device yet, or is of a torch in
  // which the functions are not found.
  [[nodiscard]] static std::optional<TorchNccl> of(c10d::Backend& backend, c10::Device device);

  // Whether NCCL has a type for the tensor's elements.
  [[nodiscard]] static bool takes(const at::Tensor& message);

  // `sum` becomes the sum over the ranks, on the stream. The host waits only if ranks still have to
  // connect. Throws CommunicationError, or TimeoutError if the communicator
  // does not block and a rank does not come within the limit.
  void all_reduce_sum(const at::Tensor& sum, std::chrono::milliseconds time_limit) const;

  // `own` [k] of every rank, in rank order: all [ranks, k]. Otherwise as all_reduce_sum().
  void all_gather(const at::Tensor& all, const at::Tensor& own,
                  std::chrono::milliseconds time_limit) const;

  // Whether the stream is being captured into a graph.
  [[nodiscard]] bool is_capturing() const;

  // From now on the calling thread may ask for events while another thread captures a graph. In
  // CUDA's default mode, that would end the capture.
  static void allow_captures_of_other_threads();

 private:
  TorchNccl(void* communicator, void* stream) : communicator_(communicator), stream_(stream) {}

  void settle(int result, const char* call, std::chrono::milliseconds time_limit) const;

  void* communicator_;
  void* stream_;
};

}  // namespace normscope::binding
