// SPDX-License-Identifier: Apache-2.0
//
// Every backend that can run here.
#include "tests/kernels/kernels_under_test.h"

namespace normscope::testing {

std::vector<const Kernels*> kernels_under_test() {
  const auto all = available_kernels();
  return {all.begin(), all.end()};
}

std::vector<const Kernels*> kernels_with_equal_bits() {
  const auto all = available_kernels();
  return {all.begin() + 1, all.end()};
}

std::vector<Shape> shapes_under_test() {
  std::vector<Shape> shapes = {{1, 3, 65}, {1, 9, 1}};
  for (const std::int64_t positions : {1, 2, 63, 64, 65, 127, 128, 129, 2047, 2048, 2049, 4097}) {
    shapes.push_back({2, 3, positions});
  }
  for (const std::int64_t channels : {1, 7, 8, 9, 31, 32, 33, 64, 70, 127, 128, 129, 130}) {
    shapes.push_back({2, channels, 5});
    shapes.push_back({3, channels, 1});
  }
  // Several channels' small planes at a time, and the channels that remain.
  for (const std::int64_t positions : {20, 33, 49, 64}) shapes.push_back({2, 35, positions});
  // Rows of 16-bit elements that are taken one at a time, or several at a time.
  shapes.push_back({2, 512, 5});
  shapes.push_back({2, 192, 133});
  return shapes;
}

}  // namespace normscope::testing
