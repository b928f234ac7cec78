// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/environment.h"

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <system_error>

#include "normscope/core/error.h"
#include "normscope/core/text.h"

namespace normscope {
namespace {

using std::chrono::milliseconds;

// In seconds. More than 30 years is no limit in practice, and would overflow in a clock's sums.
constexpr double kLongest = 1e9;
constexpr double kShortest = 1e-3;

std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

[[noreturn]] void refuse(const char* name, std::string_view expected, std::string_view text) {
  throw ArgumentError(std::string(name) + ": expected " + std::string(expected) + ", got \"" +
                      printable(text) + "\"");
}

bool flag(const char* name, bool otherwise) {
  const std::string_view text = variable(name);
  if (text.empty()) return otherwise;
  if (text != "0" && text != "1") refuse(name, "0 or 1", text);
  return text == "1";
}

bool is_limit(double seconds) { return seconds >= kShortest && seconds <= kLongest; }

std::optional<double> number(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

milliseconds in_milliseconds(double seconds) {
  return milliseconds(static_cast<std::int64_t>(seconds * 1e3));
}

}  // namespace

std::string chosen_kernels() { return std::string(variable("NORMSCOPE_KERNELS")); }

bool forces_torch_kernels() {
  constexpr const char* kName = "NORMSCOPE_DEVICE_KERNELS";
  const std::string_view text = variable(kName);
  if (!text.empty() && text != "torch") refuse(kName, "torch or nothing", text);
  return !text.empty();
}

bool uses_shared_memory() { return flag("NORMSCOPE_SHARED_MEMORY", /*otherwise=*/true); }

bool uses_peer_memory() { return flag("NORMSCOPE_PEER_MEMORY", /*otherwise=*/false); }

std::string chosen_node() { return std::string(variable("NORMSCOPE_NODE")); }

std::optional<milliseconds> chosen_time_limit() {
  constexpr const char* kName = "NORMSCOPE_TIMEOUT";
  const std::string_view text = variable(kName);
  if (text.empty()) return std::nullopt;
  const std::optional<double> seconds = number(text);
  if (!seconds || !is_limit(*seconds)) refuse(kName, "seconds from 0.001 to 1e9", text);
  return in_milliseconds(*seconds);
}

std::optional<milliseconds> warning_limit() {
  constexpr const char* kName = "NORMSCOPE_WARN_AFTER";
  const std::string_view text = variable(kName);
  if (text.empty()) return std::chrono::seconds(30);
  const std::optional<double> seconds = number(text);
  if (seconds == 0) return std::nullopt;
  if (!seconds || !is_limit(*seconds)) refuse(kName, "0, or seconds from 0.001 to 1e9", text);
  return in_milliseconds(*seconds);
}

bool detects_non_finite() { return flag("NORMSCOPE_DETECT_NON_FINITE", /*otherwise=*/false); }

bool has_exact_graphs() { return flag("NORMSCOPE_EXACT_GRAPHS", /*otherwise=*/false); }

bool checks_every_call() { return flag("NORMSCOPE_CHECK", /*otherwise=*/false); }

bool forces_exchange() { return flag("NORMSCOPE_FORCE_SYNC", /*otherwise=*/false); }

void check_environment() {
  static_cast<void>(forces_torch_kernels());
  static_cast<void>(uses_shared_memory());
  static_cast<void>(uses_peer_memory());
  static_cast<void>(chosen_time_limit());
  static_cast<void>(warning_limit());
  static_cast<void>(detects_non_finite());
  static_cast<void>(has_exact_graphs());
  static_cast<void>(checks_every_call());
  static_cast<void>(forces_exchange());
}

}  // namespace normscope
