// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/cache_lines.h"

#include <cstdint>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace normscope {
namespace {

using ::testing::Each;

template <class T>
std::int64_t bytes_into_line(const AlignedVector<T>& values) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(values.data())) % kCacheLine;
}

TEST(AlignedVector, BeginsWithACacheLineWhateverItsSize) {
  for (const std::size_t size : {1, 3, 16, 17, 1000, 100'000}) {
    AlignedVector<float> floats(size);
    AlignedVector<double> doubles(size);
    EXPECT_EQ(bytes_into_line(floats), 0) << size;
    EXPECT_EQ(bytes_into_line(doubles), 0) << size;
  }
}

TEST(AlignedVector, HoldsZerosWhenItHasGrown) {
  AlignedVector<double> values;
  values.resize(100);

  EXPECT_THAT(values, Each(0.0));
  EXPECT_EQ(bytes_into_line(values), 0);
}

}  // namespace
}  // namespace normscope
