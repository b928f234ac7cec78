// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace normscope {

// FNV-1a: the same on every machine, unlike std::hash. The low bits depend on every byte.
class Hash {
 public:
  void add(std::string_view bytes) noexcept {
    for (const char byte : bytes) add_byte(static_cast<unsigned char>(byte));
    add_byte(0xFF);  // a terminator: ("ab", "c") and ("a", "bc") must differ
  }

  // The lowest `bits` bits. A double represents them exactly for bits <= 53.
  [[nodiscard]] std::uint64_t low_bits(int bits) const noexcept {
    return value_ & ((std::uint64_t{1} << bits) - 1);
  }
  [[nodiscard]] std::uint64_t value() const noexcept { return value_; }

 private:
  void add_byte(std::uint64_t byte) noexcept { value_ = (value_ ^ byte) * 1099511628211ULL; }

  std::uint64_t value_ = 14695981039346656037ULL;
};

}  // namespace normscope
