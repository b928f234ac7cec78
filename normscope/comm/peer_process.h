// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace normscope {

// The PID namespace in which this process's id is valid. Never 0; the same number for all processes
// that cannot find theirs.
[[nodiscard]] std::uint64_t own_pid_namespace() noexcept;

// Whether a peer's process has ended, reaped or not. False if that cannot be determined: the peer
// is in another PID namespace, where its id has another meaning, or its id has been reused. In
// these cases the time limit ends a wait.
[[nodiscard]] bool has_died(std::int32_t process, std::uint64_t pid_namespace) noexcept;

}  // namespace normscope
