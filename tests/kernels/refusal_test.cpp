// SPDX-License-Identifier: Apache-2.0
#include "normscope/kernels/cuda/refusal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace normscope::cuda {
namespace {

using ::testing::HasSubstr;

TEST(RefusalTest, AnOldDriverIsNamedWithItsVersionAndTheRuntimes) {
  const Refusal refusal = {.error = "insufficient driver", .driver = 12040, .runtime = 13000};

  EXPECT_EQ(
      refusal.text(),
      "the driver is for CUDA 12.4, which is older than 13.0, with which normscope was built");
}

TEST(RefusalTest, AMissingArchitectureIsOneWithAnOlderDriverToo) {
  const Refusal refusal = {.has_no_code = true, .driver = 13000, .runtime = 13020};

  EXPECT_THAT(refusal.text(), HasSubstr("NORMSCOPE_CUDA_ARCHITECTURES"));
}

TEST(RefusalTest, OtherErrorsAreTheRuntimes) {
  EXPECT_EQ((Refusal{.error = "out of memory", .driver = 13020, .runtime = 13000}).text(),
            "out of memory");
  EXPECT_EQ((Refusal{.error = "insufficient driver", .runtime = 13000}).text(),
            "there is no driver");
}

}  // namespace
}  // namespace normscope::cuda
