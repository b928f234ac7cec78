// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

namespace normscope::mpi {

// The state of MPI in this process, and memory that MPI may still use.

[[nodiscard]] bool is_finalized() noexcept;

// Why this thread must not call MPI; empty if it may.
[[nodiscard]] std::string obstacle_of_thread();

// MPI's text for an error code.
[[nodiscard]] std::string text_of_code(int code);

// Keeps `memory` until the process ends, because MPI may still use it.
void keep_for_mpi(std::shared_ptr<void> memory);

}  // namespace normscope::mpi
