// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/environment.h"

#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "normscope/core/error.h"
#include "tests/support/text_of.h"

namespace normscope::testing {
namespace {

using namespace std::chrono_literals;

// Sets a variable during its own lifetime.
class Variable {
 public:
  Variable(std::string name, const std::string& value) : name_(std::move(name)) {
    setenv(name_.c_str(), value.c_str(), /*overwrite=*/1);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() { unsetenv(name_.c_str()); }

 private:
  std::string name_;
};

constexpr const char* kSwitches[] = {
    "NORMSCOPE_SHARED_MEMORY", "NORMSCOPE_PEER_MEMORY", "NORMSCOPE_DETECT_NON_FINITE",
    "NORMSCOPE_EXACT_GRAPHS",  "NORMSCOPE_CHECK",       "NORMSCOPE_FORCE_SYNC"};

TEST(Environment, WithoutVariablesHasDefaults) {
  EXPECT_EQ(chosen_kernels(), "");
  EXPECT_EQ(chosen_node(), "");
  EXPECT_EQ(chosen_time_limit(), std::nullopt);
  EXPECT_EQ(warning_limit(), 30s);
  EXPECT_TRUE(uses_shared_memory());
  EXPECT_FALSE(uses_peer_memory());
  EXPECT_FALSE(forces_torch_kernels());
  EXPECT_FALSE(detects_non_finite());
  EXPECT_FALSE(has_exact_graphs());
  EXPECT_FALSE(checks_every_call());
  EXPECT_FALSE(forces_exchange());
  check_environment();
}

TEST(Environment, HasTheValuesOfItsVariables) {
  const Variable kernels("NORMSCOPE_KERNELS", "avx2");
  const Variable device("NORMSCOPE_DEVICE_KERNELS", "torch");
  const Variable memory("NORMSCOPE_SHARED_MEMORY", "0");
  const Variable peers("NORMSCOPE_PEER_MEMORY", "1");
  const Variable node("NORMSCOPE_NODE", "any text");
  const Variable limit("NORMSCOPE_TIMEOUT", "1.5");
  const Variable warning("NORMSCOPE_WARN_AFTER", "0");
  const Variable finite("NORMSCOPE_DETECT_NON_FINITE", "1");
  const Variable graphs("NORMSCOPE_EXACT_GRAPHS", "1");
  const Variable check("NORMSCOPE_CHECK", "1");
  const Variable force("NORMSCOPE_FORCE_SYNC", "1");

  EXPECT_EQ(chosen_kernels(), "avx2");
  EXPECT_TRUE(forces_torch_kernels());
  EXPECT_FALSE(uses_shared_memory());
  EXPECT_TRUE(uses_peer_memory());
  EXPECT_EQ(chosen_node(), "any text");
  EXPECT_EQ(chosen_time_limit(), 1500ms);
  EXPECT_EQ(warning_limit(), std::nullopt);
  EXPECT_TRUE(detects_non_finite());
  EXPECT_TRUE(has_exact_graphs());
  EXPECT_TRUE(checks_every_call());
  EXPECT_TRUE(forces_exchange());
  check_environment();
}

TEST(Environment, AnEmptyVariableIsLikeNone) {
  for (const char* name : kSwitches) {
    const Variable variable(name, "");
    check_environment();
  }
  const Variable memory("NORMSCOPE_SHARED_MEMORY", "");
  const Variable limit("NORMSCOPE_TIMEOUT", "");
  const Variable warning("NORMSCOPE_WARN_AFTER", "");
  EXPECT_TRUE(uses_shared_memory());
  EXPECT_EQ(chosen_time_limit(), std::nullopt);
  EXPECT_EQ(warning_limit(), 30s);
}

void expect_refused(const std::string& name, const std::string& value,
                    const std::string& expected) {
  const Variable variable(name, value);
  EXPECT_EQ(text_of<ArgumentError>([] { check_environment(); }),
            name + ": expected " + expected + ", got \"" + value + "\"");
}

TEST(Environment, WhatItCannotUnderstandIsRefusedByName) {
  for (const char* name : kSwitches) {
    for (const char* value : {"yes", "true", "2", "01", " 1"}) {
      expect_refused(name, value, "0 or 1");
    }
  }
  for (const char* value : {"x", "0", "-1", "nan", "inf", "1 s", "1e10", "0.0001", " 1"}) {
    expect_refused("NORMSCOPE_TIMEOUT", value, "seconds from 0.001 to 1e9");
  }
  for (const char* value : {"x", "-1", "nan", "inf", "1 s", "1e10", "0.0001", "off"}) {
    expect_refused("NORMSCOPE_WARN_AFTER", value, "0, or seconds from 0.001 to 1e9");
  }
  for (const char* value : {"own", "Torch", "1"}) {
    expect_refused("NORMSCOPE_DEVICE_KERNELS", value, "torch or nothing");
  }
}

TEST(Environment, AnyBytesOfAValueAreShown) {
  const Variable variable("NORMSCOPE_CHECK", "\xff\n");

  EXPECT_EQ(text_of<ArgumentError>([] { check_environment(); }),
            "NORMSCOPE_CHECK: expected 0 or 1, got \"\\xff\\x0a\"");
}

}  // namespace
}  // namespace normscope::testing
