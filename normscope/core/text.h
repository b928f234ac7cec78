// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// Texts are UTF-8. Those from other processes, or from C++ programs, may be anything: Python cannot
// decode an error with one byte that is not UTF-8, and would raise another error in its place.

enum class Keep { kBeginning, kEnd };

// The beginning or the end of a text, of at most `most` bytes. No character is cut in two.
[[nodiscard]] std::string_view shortened(std::string_view text, std::size_t most,
                                         Keep keep = Keep::kBeginning) noexcept;

// The text with each byte that is not UTF-8 in hexadecimal: "\xff".
[[nodiscard]] std::string as_utf8(std::string_view text);

// The same, safe to print in a terminal: control characters are shown in hexadecimal too.
[[nodiscard]] std::string printable(std::string_view text);

// The shortest decimal number that is nearer to this one than to any other double: "1e-05".
[[nodiscard]] std::string decimal(double number);

// The buffers of the reasons why groups fail, with a final zero. Longer reasons are cut.
inline constexpr std::size_t kReasonBytes = 1024;

// A text in a buffer of fixed size, which ends with a zero. What does not fit is left out.
template <std::size_t Bytes>
class FixedText {
 public:
  void put(std::string_view text, Keep keep = Keep::kBeginning) noexcept {
    text = shortened(text, Bytes - 1 - size_, keep);
    size_ += text.copy(bytes_.data() + size_, text.size());
  }

  [[nodiscard]] const std::array<char, Bytes>& bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::string_view view() const noexcept { return {bytes_.data(), size_}; }

 private:
  std::array<char, Bytes> bytes_ = {};
  std::size_t size_ = 0;
};

}  // namespace normscope
