// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "normscope/batch_norm/batch_norm.h"

namespace normscope::binding {

// DeviceContext's workspace and scratch for one call. Calls that follow on the stream use them
// again, because their work runs after this call's. Calls that other threads make on the stream
// meanwhile have others. This is not memory of torch's allocator: each call would have to ask it,
// and during a call it may take memory from a pool of a graph and use it again afterwards.
//
// A graph may run at any time, next to any stream. Each of its calls has zeros that no other call
// uses, and a workspace of torch's allocator, which takes it from the graph's pool.
class DeviceMemory {
 public:
  // Memory for a call of x's channels with the kernels and the stream of `device`, which points to
  // it then. If the kernels cannot run there, throws an error that Python shows as RuntimeError.
  DeviceMemory(const at::Tensor& x, std::int64_t slices, DeviceContext& device);
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  // The next call on the stream takes it. All work of this call must have been queued.
  ~DeviceMemory();

  struct Block {
    double* data = nullptr;
    std::int64_t size = 0;
  };
  struct Kept {
    Block workspace;
    Block scratch;
  };
  struct OfStream {
    std::vector<Kept> unused;  // has room for those that calls have taken
    std::size_t taken = 0;
  };

 private:
  // Takes memory that is not in use; nullptr: none.
  explicit DeviceMemory(OfStream* stream);

  OfStream* stream_;  // nullptr while it is captured
  Kept kept_;
  at::Tensor of_graph_;
};

}  // namespace normscope::binding
