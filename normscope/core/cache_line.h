// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace normscope {

// In bytes.
inline constexpr std::int64_t kCacheLine = 64;

// `bytes` rounded up to whole cache lines.
[[nodiscard]] constexpr std::size_t whole_cache_lines(std::size_t bytes) noexcept {
  constexpr std::size_t kLine{kCacheLine};
  return (bytes + kLine - 1) / kLine * kLine;
}

}  // namespace normscope
