// SPDX-License-Identifier: Apache-2.0
//
// Everything that an executable with this file allocates lies in managed memory, which the host and
// a GPU can both reach: tests written for the host's memory then run with the kernels of a device.
#include <cstddef>
#include <cstdlib>
#include <new>

#include <cuda_runtime.h>

namespace {

// What stands before a block: where it came from, and where it begins.
struct Origin {
  void* begin;
  bool is_managed;
};

// The runtime may allocate while it allocates.
thread_local bool is_allocating = false;

void* managed(std::size_t bytes) {
  if (is_allocating) return nullptr;
  is_allocating = true;
  void* begin = nullptr;
  const bool found = cudaMallocManaged(&begin, bytes) == cudaSuccess;
  is_allocating = false;
  return found ? begin : nullptr;
}

void* allocate(std::size_t bytes, std::size_t alignment) {
  const std::size_t room = bytes + sizeof(Origin) + alignment;
  void* begin = managed(room);
  const bool is_managed = begin != nullptr;
  if (!is_managed) begin = std::malloc(room);
  if (begin == nullptr) throw std::bad_alloc();
  auto address = reinterpret_cast<std::size_t>(begin) + sizeof(Origin);
  address = (address + alignment - 1) / alignment * alignment;
  static_cast<Origin*>(reinterpret_cast<void*>(address))[-1] = {begin, is_managed};
  return reinterpret_cast<void*>(address);
}

void release(void* block) {
  if (block == nullptr) return;
  const Origin origin = static_cast<Origin*>(block)[-1];
  if (origin.is_managed) {
    cudaFree(origin.begin);  // fails where the runtime is gone at exit, and the memory with it
  } else {
    std::free(origin.begin);
  }
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* block) noexcept { release(block); }
void operator delete(void* block, std::size_t) noexcept { release(block); }
void operator delete(void* block, std::align_val_t) noexcept { release(block); }
void operator delete(void* block, std::size_t, std::align_val_t) noexcept { release(block); }
