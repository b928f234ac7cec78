// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace normscope {

// In bytes.
inline constexpr std::int64_t kCacheLine = 64;

// `bytes` rounded up to whole cache lines.
[[nodiscard]] constexpr std::size_t whole_cache_lines(std::size_t bytes) noexcept {
  constexpr std::size_t kLine{kCacheLine};
  return (bytes + kLine - 1) / kLine * kLine;
}

// Allocates memory that starts at a cache line.
template <class T>
struct CacheLineAllocator {
  using value_type = T;  // NOLINT(readability-identifier-naming): the standard's name

  CacheLineAllocator() = default;
  template <class Other>
  explicit CacheLineAllocator(const CacheLineAllocator<Other>& /*other*/) noexcept {}

  [[nodiscard]] T* allocate(std::size_t n) {
    return static_cast<T*>(::operator new(n * sizeof(T), kAlignment));
  }
  void deallocate(T* memory, std::size_t /*n*/) noexcept { ::operator delete(memory, kAlignment); }

  bool operator==(const CacheLineAllocator&) const = default;

 private:
  static constexpr std::align_val_t kAlignment{kCacheLine};
};

// For arrays that are read and written with vector instructions: a vector that straddles two cache
// lines takes twice as long.
template <class T>
using AlignedVector = std::vector<T, CacheLineAllocator<T>>;

}  // namespace normscope
