// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/text.h"

#include <cstddef>
#include <limits>
#include <string>
#include <string_view>

#include <gtest/gtest.h>

namespace normscope::testing {
namespace {

// Of 1, 2, 3 and 4 bytes: the first and the last of each length, and those around the surrogates.
constexpr std::string_view kCharacters[] = {"a",
                                            "\x7f",
                                            "\xc2\x80",
                                            "\xd0\xb9",
                                            "\xdf\xbf",
                                            "\xe0\xa0\x80",
                                            "\xe2\x82\xac",
                                            "\xed\x9f\xbf",
                                            "\xee\x80\x80",
                                            "\xef\xbf\xbf",
                                            "\xf0\x90\x80\x80",
                                            "\xf0\x9f\x98\x80",
                                            "\xf4\x8f\xbf\xbf"};

// A stray or missing continuation, overlong forms, surrogates, beyond U+10FFFF, bytes of no text.
constexpr std::string_view kNotUtf8[] = {"\x80",
                                         "\xbf\xbf\xbf\xbf\xbf",
                                         "\xc3",
                                         "\xe2\x82",
                                         "\xf0\x9f\x98",
                                         "\xc0\x80",
                                         "\xc1\xbf",
                                         "\xe0\x9f\xbf",
                                         "\xed\xa0\x80",
                                         "\xf0\x8f\xbf\xbf",
                                         "\xf4\x90\x80\x80",
                                         "\xf5\x80\x80\x80",
                                         "\xff",
                                         "\xfe"};

TEST(Shortened, KeepsShortTexts) {
  EXPECT_EQ(shortened("", 0), "");
  EXPECT_EQ(shortened("abc", 3), "abc");
  EXPECT_EQ(shortened("abc", 9, Keep::kEnd), "abc");
}

TEST(Shortened, KeepsTheBeginningOrTheEnd) {
  EXPECT_EQ(shortened("abc", 2), "ab");
  EXPECT_EQ(shortened("abc", 2, Keep::kEnd), "bc");
  EXPECT_EQ(shortened("abc", 0), "");
  EXPECT_EQ(shortened("abc", 0, Keep::kEnd), "");
}

TEST(Shortened, NeverDividesACharacter) {
  for (const std::string_view character : kCharacters) {
    for (std::size_t before = 0; before < 5; ++before) {
      const std::string text =
          std::string(before, '<') + std::string(character) + std::string(4 - before, '>');
      const std::size_t after = before + character.size();
      for (std::size_t most = 0; most <= text.size(); ++most) {
        const std::size_t end = most > before && most < after ? before : most;
        EXPECT_EQ(shortened(text, most), text.substr(0, end)) << text << " in " << most;
        const std::size_t at = text.size() - most;
        const std::size_t begin = at > before && at < after ? after : at;
        EXPECT_EQ(shortened(text, most, Keep::kEnd), text.substr(begin)) << text << " in " << most;
      }
    }
  }
}

TEST(Shortened, DividesWhatIsNotUtf8) {
  for (const std::string_view bytes : kNotUtf8) {
    for (std::size_t most = 0; most <= bytes.size(); ++most) {
      EXPECT_EQ(shortened(bytes, most), bytes.substr(0, most));
      EXPECT_EQ(shortened(bytes, most, Keep::kEnd), bytes.substr(bytes.size() - most));
    }
  }
}

TEST(AsUtf8, KeepsEveryCharacter) {
  for (const std::string_view character : kCharacters) EXPECT_EQ(as_utf8(character), character);
  EXPECT_EQ(as_utf8("a\n\tb"), "a\n\tb");
}

TEST(AsUtf8, ShowsOtherBytesInHexadecimal) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  for (const std::string_view bytes : kNotUtf8) {
    std::string expected = "(";
    for (const char character : bytes) {
      const auto byte = static_cast<unsigned char>(character);
      expected += std::string("\\x") + kDigits[byte / 16] + kDigits[byte % 16];
    }
    EXPECT_EQ(as_utf8("(" + std::string(bytes) + ")"), expected + ")");
  }
  EXPECT_EQ(as_utf8("\xd0\xb9\xd0"), "\xd0\xb9\\xd0");
}

TEST(Printable, ShowsControlCharactersInHexadecimal) {
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\x1b[2J\n\x7f"), "\\x1b[2J\\x0a\\x7f");
  EXPECT_EQ(printable("\xc2\x9b"
                      "2J\xc2\xa0"),
            "\\xc2\\x9b2J\xc2\xa0");
  EXPECT_EQ(printable("\xd1\x81\xd0\xbb\xd0\xbe\xd0\xb9\xff"),
            "\xd1\x81\xd0\xbb\xd0\xbe\xd0\xb9\\xff");
}

TEST(Decimal, TellsDoublesApart) {
  EXPECT_EQ(decimal(0.1), "0.1");
  EXPECT_EQ(decimal(double{0.1F}), "0.10000000149011612");
  EXPECT_EQ(decimal(-std::numeric_limits<double>::min()), "-2.2250738585072014e-308");
}

TEST(FixedText, LeavesOutWhatDoesNotFit) {
  FixedText<8> text;
  text.put("ab\xd0\xb9");
  text.put("\xf0\x9f\x98\x80");
  EXPECT_EQ(text.view(), "ab\xd0\xb9");
  text.put("0123", Keep::kEnd);
  EXPECT_EQ(text.view(),
            "ab\xd0\xb9"
            "123");
  text.put("4");
  EXPECT_EQ(std::string_view(text.bytes().data()), text.view());
}

}  // namespace
}  // namespace normscope::testing
