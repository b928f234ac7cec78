// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/text.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <iterator>

namespace normscope {
namespace {

constexpr std::size_t kLongestCharacter = 4;

std::uint32_t byte_at(std::string_view text, std::size_t index) {
  return static_cast<unsigned char>(text[index]);
}

// How many bytes a character has that begins with this one; 0: none does.
std::size_t length_after(std::uint32_t first) {
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return 2;
  if (first >= 0xE0 && first <= 0xEF) return 3;
  if (first >= 0xF0 && first <= 0xF4) return 4;
  return 0;
}

// The length of the character at the beginning of a text; 0 if it does not begin with one.
std::size_t length_of_first(std::string_view text) {
  const std::uint32_t first = byte_at(text, 0);
  const std::size_t length = length_after(first);
  if (length <= 1) return length;
  if (text.size() < length) return 0;
  std::uint32_t code = first & (0x7FU >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte_at(text, i) & 0xC0U) != 0x80) return 0;
    code = code << 6U | (byte_at(text, i) & 0x3FU);
  }
  constexpr std::uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xD800 && code <= 0xDFFF;
  return code >= kSmallest[length] && code <= 0x10FFFF && !is_surrogate ? length : 0;
}

// U+0000 to U+001F and U+007F to U+009F.
bool is_control(std::string_view character) {
  const std::uint32_t first = byte_at(character, 0);
  return first < 0x20 || first == 0x7F || (first == 0xC2 && byte_at(character, 1) < 0xA0);
}

template <class Condition>
std::string with_escapes(std::string_view text, const Condition& is_escaped) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string result;
  while (!text.empty()) {
    const std::size_t length = length_of_first(text);
    const std::string_view next = text.substr(0, std::max<std::size_t>(length, 1));
    text.remove_prefix(next.size());
    if (length != 0 && !is_escaped(next)) {
      result += next;
      continue;
    }
    for (std::size_t i = 0; i < next.size(); ++i) {
      const std::uint32_t byte = byte_at(next, i);
      ((result += "\\x") += kDigits[byte / 16]) += kDigits[byte % 16];
    }
  }
  return result;
}

}  // namespace

std::string_view shortened(std::string_view text, std::size_t most, Keep keep) noexcept {
  if (text.size() <= most) return text;
  const bool keeps_beginning = keep == Keep::kBeginning;
  const std::size_t at = keeps_beginning ? most : text.size() - most;
  std::size_t begin = at;  // of the character that `at` is in
  std::size_t end = at;
  for (std::size_t back = 1; back < kLongestCharacter && back <= at; ++back) {
    const std::size_t length = length_of_first(text.substr(at - back));
    if (length <= back) continue;
    begin = at - back;
    end = begin + length;
  }
  return keeps_beginning ? text.substr(0, begin) : text.substr(end);
}

std::string as_utf8(std::string_view text) {
  return with_escapes(text, [](std::string_view) { return false; });
}

std::string printable(std::string_view text) { return with_escapes(text, is_control); }

std::string decimal(double number) {
  char digits[32];  // the longest is "-2.2250738585072014e-308"
  return {digits, std::to_chars(std::begin(digits), std::end(digits), number).ptr};
}

}  // namespace normscope
