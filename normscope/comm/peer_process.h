// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace normscope {

// The PID namespace of this process: what its id is a number of. Never 0; the same number for all
// processes that cannot find out.
[[nodiscard]] std::uint64_t own_pid_namespace() noexcept;

// Whether the process of a peer has ended, reaped or not. False where that cannot be told: for a
// process of another PID namespace, in which its number stands for another process or for none, and
// where its number has been given to another process since. The time limit then ends a wait.
[[nodiscard]] bool has_died(std::int32_t process, std::uint64_t pid_namespace) noexcept;

}  // namespace normscope
