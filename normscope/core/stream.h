// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace normscope {

// The queue of a device on which work is ordered: a cudaStream_t, or nothing on the CPU.
struct Stream {
  void* handle = nullptr;
};

}  // namespace normscope
