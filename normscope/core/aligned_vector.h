// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <new>
#include <vector>

#include "normscope/core/cache_line.h"

namespace normscope {

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
