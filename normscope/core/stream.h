// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace normscope {

// Where the numbers lie that work is done on.
enum class Memory { kHost, kDevice };

// The queue of a device on which work is ordered: a cudaStream_t, or nothing on the CPU.
struct Stream {
  void* handle = nullptr;
  Memory memory = Memory::kHost;
};

}  // namespace normscope
