// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace normscope {

// Which memory the data is in.
enum class Memory { kHost, kDevice };

// The queue that orders work on a device: a cudaStream_t, or nothing on the CPU.
struct Stream {
  void* handle = nullptr;
  Memory memory = Memory::kHost;
};

}  // namespace normscope
