// SPDX-License-Identifier: Apache-2.0
//
// While its tests run, an executable with this file allocates managed memory, which both the host
// and a GPU can access. Tests that were written for host memory then run with the kernels of a
// device.
//
// The suites allocate millions of blocks, and cudaMallocManaged takes microseconds or more. Blocks
// are therefore cut from a few large pieces, and kept for the next block of their size.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>

#include <cuda_runtime.h>
#include <gtest/gtest.h>

namespace {

// In front of every block.
struct alignas(std::max_align_t) Origin {
  void* begin;
  int size_class;  // log2 of the bytes from `begin`, or kOfMalloc
};

constexpr int kOfMalloc = -1;

// Free blocks of one size. Their addresses are stored elsewhere: a block may be in the device's
// memory, and reading it would fetch its page.
class FreeBlocks {
 public:
  [[nodiscard]] bool empty() const { return count_ == 0; }
  void* pop() { return blocks_[--count_]; }
  void push(void* block) {
    if (count_ == room_) grow();
    blocks_[count_++] = block;
  }

 private:
  void grow() {
    room_ = std::max<std::size_t>(2 * room_, 1024);
    auto* const blocks =
        static_cast<void**>(std::realloc(static_cast<void*>(blocks_), room_ * sizeof(void*)));
    if (blocks == nullptr) std::abort();  // a delete cannot fail, and would lose the block
    blocks_ = blocks;
  }

  void** blocks_ = nullptr;
  std::size_t count_ = 0;
  std::size_t room_ = 0;
};

// Blocks whose sizes are powers of two, cut from pieces that are never freed.
class ManagedArena {
 public:
  // nullptr if there is no memory left.
  void* take(int size_class) {
    const std::lock_guard lock(mutex_);
    FreeBlocks& free = free_[size_class];
    if (!free.empty()) return free.pop();
    const std::size_t bytes = std::size_t{1} << size_class;
    if (bytes > kPiece) return new_piece(bytes);
    if (bytes > left_) {
      piece_ = new_piece(kPiece);
      left_ = piece_ == nullptr ? 0 : kPiece;
      if (piece_ == nullptr) return nullptr;
    }
    left_ -= bytes;
    return piece_ + left_;
  }

  void give_back(void* block, int size_class) {
    const std::lock_guard lock(mutex_);
    free_[size_class].push(block);
  }

 private:
  static constexpr std::size_t kPiece = std::size_t{256} << 20U;

  static std::byte* new_piece(std::size_t bytes) {
    void* piece = nullptr;
    return cudaMallocManaged(&piece, bytes) == cudaSuccess ? static_cast<std::byte*>(piece)
                                                           : nullptr;
  }

  std::mutex mutex_;
  FreeBlocks free_[64];
  std::byte* piece_ = nullptr;
  std::size_t left_ = 0;  // unused bytes at the beginning of the piece
};

constinit ManagedArena arena;
constinit std::atomic<bool> tests_run = false;

// The runtime itself allocates during an allocation.
thread_local bool is_allocating = false;

// Before the tests there may be no device to ask, and nothing for it to read.
class UseManagedMemory : public ::testing::Environment {
 public:
  void SetUp() override { tests_run = true; }
  void TearDown() override { tests_run = false; }
};

[[maybe_unused]] const ::testing::Environment* const kEnvironment =
    ::testing::AddGlobalTestEnvironment(new UseManagedMemory);

void* allocate(std::size_t bytes, std::size_t alignment) {
  std::size_t room = bytes + sizeof(Origin) + alignment;
  Origin origin = {nullptr, kOfMalloc};
  if (tests_run && !is_allocating) {
    is_allocating = true;
    origin.size_class = static_cast<int>(std::bit_width(room - 1));
    origin.begin = arena.take(origin.size_class);
    is_allocating = false;
  } else {
    origin.begin = std::malloc(room);
  }
  if (origin.begin == nullptr) throw std::bad_alloc();
  room -= sizeof(Origin);
  void* block = static_cast<Origin*>(origin.begin) + 1;
  std::align(alignment, bytes, block, room);
  static_cast<Origin*>(block)[-1] = origin;
  return block;
}

void release(void* block) {
  if (block == nullptr) return;
  const Origin origin = static_cast<Origin*>(block)[-1];
  if (origin.size_class == kOfMalloc) {
    std::free(origin.begin);
  } else {
    arena.give_back(origin.begin, origin.size_class);
  }
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, std::max(static_cast<std::size_t>(alignment), alignof(std::max_align_t)));
}
void operator delete(void* block) noexcept { release(block); }
void operator delete(void* block, std::size_t) noexcept { release(block); }
void operator delete(void* block, std::align_val_t) noexcept { release(block); }
void operator delete(void* block, std::size_t, std::align_val_t) noexcept { release(block); }
