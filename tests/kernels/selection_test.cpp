// SPDX-License-Identifier: Apache-2.0
//
// Which backends run here, why those of a device do not, and how one is forced. default_kernels()
// reads the environment once, so every choice is made in a process of its own.
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/core/error.h"
#include "normscope/kernels/cuda/refusal.h"
#include "normscope/kernels/kernels.h"
#include "tests/support/ranks.h"
#include "tests/support/text_of.h"

namespace normscope::testing {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::vector<std::string> names_of(std::span<const Kernels* const> kernels) {
  std::vector<std::string> names;
  for (const Kernels* one : kernels) names.emplace_back(one->name);
  return names;
}

// What the operating system says, which the library does not use.
std::set<std::string> processor_flags() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("flags")) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    return {std::istream_iterator<std::string>(words), {}};
  }
  return {};
}

std::vector<std::string> promised_kernels() {
  std::vector<std::string> names{"reference", "baseline"};
#if defined(__x86_64__)
  const std::set<std::string> flags = processor_flags();
  const auto has = [&](const std::vector<std::string>& wanted) {
    return std::ranges::all_of(wanted, [&](const auto& flag) { return flags.contains(flag); });
  };
  if (has({"avx2", "f16c", "fma"})) names.emplace_back("avx2");
  if (has({"avx512f", "avx512bw", "avx512vl", "avx512dq"})) names.emplace_back("avx512");
#endif
  return names;
}

TEST(AvailableKernels, AreWhatTheProcessorPromises) {
  std::cout << "kernels that run here:";
  for (const std::string& name : names_of(available_kernels())) std::cout << ' ' << name;
  std::cout << '\n' << std::flush;

  EXPECT_EQ(names_of(available_kernels()), promised_kernels());
}

TEST(AvailableKernels, AreFoundByName) {
  for (const Kernels* kernels : available_kernels()) {
    EXPECT_EQ(&kernels_named(kernels->name), kernels);
  }
  EXPECT_THAT(
      text_of<ArgumentError>([] { (void)kernels_named("sse9"); }),
      AllOf(StartsWith("kernels: expected one of reference baseline"), EndsWith(", got \"sse9\"")));
}

// Runs `body` in a process whose environment forces `name`; nullptr forces nothing.
template <class Body>
void with_forced(const char* name, const Body& body) {
  spawn_processes(1, [&](int /*rank*/) {
    if (name == nullptr) {
      unsetenv("NORMSCOPE_KERNELS");
    } else {
      setenv("NORMSCOPE_KERNELS", name, 1);
    }
    body();
  });
}

std::string refusal() {
  return text_of<ArgumentError>([] { (void)default_kernels(); });
}

TEST(ForcedKernels, TakeEffectWhereTheyCanRunAndAreRefusedWhereNot) {
  for (const Kernels* kernels : built_kernels()) {
    const std::string name(kernels->name);
    with_forced(name.c_str(), [&] {
      if (kernels->can_run()) {
        EXPECT_EQ(&default_kernels(), kernels) << name;
      } else {
        EXPECT_THAT(refusal(), EndsWith("got \"" + name + "\", which this machine cannot run"));
      }
    });
  }
}

TEST(ForcedKernels, UnknownNamesAreRefusedWithTheChoices) {
  with_forced("fastest", [] {
    const std::string text = refusal();

    EXPECT_THAT(text, AllOf(StartsWith("NORMSCOPE_KERNELS: expected one of"),
                            EndsWith(", got \"fastest\"")));
    for (const Kernels* kernels : available_kernels()) {
      EXPECT_THAT(text, HasSubstr(std::string(" ").append(kernels->name)));
    }
  });
}

TEST(ForcedKernels, NamesThatAreNoTextAreShownInHexadecimal) {
  with_forced("\xff\x1b", [] { EXPECT_THAT(refusal(), EndsWith(", got \"\\xff\\x1b\"")); });
}

TEST(ForcedKernels, WithoutForceTheFastestIsTaken) {
  with_forced(nullptr, [] { EXPECT_EQ(&default_kernels(), available_kernels().back()); });
}

TEST(DeviceRefusal, AnOldDriverIsNamedWithItsVersionAndTheRuntimes) {
  const cuda::Refusal refusal = {.error = "insufficient driver", .driver = 12040, .runtime = 13000};

  EXPECT_EQ(
      refusal.text(),
      "the driver is for CUDA 12.4, which is older than 13.0, with which normscope was built");
}

TEST(DeviceRefusal, AMissingArchitectureIsOneWithAnOlderDriverToo) {
  const cuda::Refusal refusal = {.has_no_code = true, .driver = 13000, .runtime = 13020};

  EXPECT_THAT(refusal.text(), HasSubstr("NORMSCOPE_CUDA_ARCHITECTURES"));
}

TEST(DeviceRefusal, OtherErrorsAreTheRuntimes) {
  EXPECT_EQ((cuda::Refusal{.error = "out of memory", .driver = 13020, .runtime = 13000}).text(),
            "out of memory");
  EXPECT_EQ((cuda::Refusal{.error = "insufficient driver", .runtime = 13000}).text(),
            "there is no driver");
}

}  // namespace
}  // namespace normscope::testing
