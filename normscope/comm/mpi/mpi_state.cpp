// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/mpi/mpi_state.h"

#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

#include <mpi.h>

namespace normscope::mpi {

bool is_finalized() noexcept {
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized != 0;
}

std::string obstacle_of_thread() {
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  if (level >= MPI_THREAD_SERIALIZED) return "";
  if (level < MPI_THREAD_FUNNELED) {
    return "expected MPI to be initialized with MPI_THREAD_FUNNELED or more, got "
           "MPI_THREAD_SINGLE; call MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided) "
           "in place of MPI_Init";
  }
  int is_main = 0;
  MPI_Is_thread_main(&is_main);
  return is_main != 0 ? ""
                      : "expected a call from the thread that initialized MPI, with "
                        "MPI_THREAD_FUNNELED, got one from another thread; initialize with "
                        "MPI_THREAD_SERIALIZED to allow it";
}

std::string text_of_code(int code) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  return {text, static_cast<std::size_t>(length)};
}

void keep_for_mpi(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<std::shared_ptr<void>>;
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(memory));
}

}  // namespace normscope::mpi
