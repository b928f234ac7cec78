// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/watch/environment.h"

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <system_error>

#include <c10/util/Exception.h>

namespace normscope::binding {
namespace {

using std::chrono::milliseconds;

// In seconds. More than 30 years is no limit in practice, and would overflow in a clock's sums.
constexpr double kLongest = 1e9;
constexpr double kShortest = 1e-3;

enum class Zero { kIsAnError, kIsNone };

std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Parses seconds. Returns zero for no limit, if `zero` allows that.
milliseconds limit_of(const char* name, std::string_view text, Zero zero) {
  double seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  const bool is_number = error == std::errc{} && end == text.data() + text.size();
  if (is_number && seconds == 0 && zero == Zero::kIsNone) return milliseconds::zero();
  TORCH_CHECK_VALUE(is_number && seconds >= kShortest && seconds <= kLongest, name,
                    ": expected seconds from 0.001 to 1e9, got \"", text, "\"");
  return milliseconds(static_cast<std::int64_t>(seconds * 1e3));
}

}  // namespace

std::optional<milliseconds> chosen_time_limit() {
  constexpr const char* kName = "NORMSCOPE_TIMEOUT";
  const std::string_view text = environment(kName);
  if (text.empty()) return std::nullopt;
  return limit_of(kName, text, Zero::kIsAnError);
}

std::optional<milliseconds> warning_limit() {
  constexpr const char* kName = "NORMSCOPE_WARN_AFTER";
  const std::string_view text = environment(kName);
  if (text.empty()) return std::chrono::seconds(30);
  const milliseconds limit = limit_of(kName, text, Zero::kIsNone);
  if (limit == milliseconds::zero()) return std::nullopt;
  return limit;
}

bool forces_exchange() { return environment("NORMSCOPE_FORCE_SYNC") == "1"; }

bool detects_non_finite() { return environment("NORMSCOPE_DETECT_NON_FINITE") == "1"; }

bool forces_torch_kernels() {
  const std::string_view text = environment("NORMSCOPE_DEVICE_KERNELS");
  TORCH_CHECK_VALUE(text.empty() || text == "torch",
                    "NORMSCOPE_DEVICE_KERNELS: expected torch or nothing, got \"", text, "\"");
  return text == "torch";
}

}  // namespace normscope::binding
