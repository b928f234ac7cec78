// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/header.h"

#include <cmath>
#include <cstdint>

#include <gtest/gtest.h>

namespace normscope::testing {
namespace {

// The totals of `ranks` equal headers, of which `others` have the hash `other` instead. Products of
// 64-bit integers, which are exact here.
Header totals_of(std::int64_t ranks, std::int64_t hash, std::int64_t others, std::int64_t other) {
  const std::int64_t sum = (ranks - others) * hash + others * other;
  const std::int64_t squares = (ranks - others) * hash * hash + others * other * other;
  EXPECT_EQ(static_cast<std::int64_t>(static_cast<double>(squares)), squares);
  EXPECT_LE(squares, std::int64_t{1} << 53);
  return {{0.0, static_cast<double>(sum), static_cast<double>(squares), 0.0}};
}

TEST(Header, HashesHaveTwentyBitsUpTo8192RanksAndFewerAbove) {
  EXPECT_EQ(hash_bits(1), 20);
  EXPECT_EQ(hash_bits(8192), 20);
  EXPECT_EQ(hash_bits(8193), 19);
  EXPECT_EQ(hash_bits(10'000), 19);
  EXPECT_EQ(hash_bits(32'768), 19);
  EXPECT_EQ(hash_bits(32'769), 18);
  EXPECT_EQ(hash_bits(1 << 20), 16);
}

TEST(Header, OneRankAmongManyThatMadeAnotherCallIsFound) {
  for (const std::int64_t ranks : {2, 3, 1000, 8191, 8192, 8193, 10'000, 65'536, 1 << 20}) {
    const std::int64_t largest = (std::int64_t{1} << hash_bits(ranks)) - 1;
    for (const std::int64_t hash : {largest, largest - 1, largest / 2, std::int64_t{1}}) {
      const auto all = static_cast<double>(ranks);
      EXPECT_TRUE(ranks_agree(totals_of(ranks, hash, 0, 0).fields, all)) << ranks << ' ' << hash;
      for (const std::int64_t other : {hash - 1, std::int64_t{0}}) {
        for (const std::int64_t others : {std::int64_t{1}, ranks / 2, ranks - 1}) {
          EXPECT_FALSE(ranks_agree(totals_of(ranks, hash, others, other).fields, all))
              << ranks << ' ' << hash << ' ' << others << ' ' << other;
        }
      }
    }
  }
}

}  // namespace
}  // namespace normscope::testing
