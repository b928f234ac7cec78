// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <optional>

namespace normscope::binding {

// NORMSCOPE_TIMEOUT: how long a rank waits for its peers, instead of the process group's limit;
// nullopt if it is not set. Throws c10::ValueError unless it is a number of seconds from 0.001 to
// 1e9.
[[nodiscard]] std::optional<std::chrono::milliseconds> chosen_time_limit();

// NORMSCOPE_WARN_AFTER: how long a rank waits before the wait is logged; 30 s if it is not set,
// nullopt if it is 0. Throws as above.
[[nodiscard]] std::optional<std::chrono::milliseconds> warning_limit();

// NORMSCOPE_FORCE_SYNC=1: whether a group of one rank exchanges as larger groups do.
[[nodiscard]] bool forces_exchange();

// NORMSCOPE_DETECT_NON_FINITE=1: see set_detect_non_finite().
[[nodiscard]] bool detects_non_finite();

// NORMSCOPE_DEVICE_KERNELS=torch: whether torch's kernels normalize all tensors. Throws
// c10::ValueError if it is something else.
[[nodiscard]] bool forces_torch_kernels();

}  // namespace normscope::binding
