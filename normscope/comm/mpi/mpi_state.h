// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

namespace normscope::mpi {

// What MPI is ready for in this process, and what it still holds.

[[nodiscard]] bool is_finalized() noexcept;

// Empty, or what forbids this thread to call MPI.
[[nodiscard]] std::string obstacle_of_thread();

// What an error of MPI is called.
[[nodiscard]] std::string text_of_code(int code);

// Until the process ends: what MPI may still use cannot be taken from it.
void keep_for_mpi(std::shared_ptr<void> memory);

}  // namespace normscope::mpi
