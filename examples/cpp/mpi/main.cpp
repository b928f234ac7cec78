// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <exception>

#include <mpi.h>
#include <normscope/comm/mpi/mpi_communicator.h>
#include <normscope/torch/groups/rank_group.h>

#include "segmentation/command.h"

namespace {

constexpr const char* kDescription =
    "Trains the segmentation network of the demo on ranks that mpirun starts (mpirun -n 4 ...).\n"
    "Prints a hash of the running statistics after the first step, which python_run.py prints "
    "too,\n"
    "and the quality at the end.\n";

int fail(const std::exception& error) {
  std::fprintf(stderr, "mpi: %s\n", error.what());
  return 2;
}

int run(const Command& command) {
  // libtorch has threads of its own; only this one calls MPI.
  int provided = MPI_THREAD_SINGLE;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
  try {
    train(command, normscope::RankGroup(normscope::make_mpi_communicator(MPI_COMM_WORLD)));
  } catch (const std::exception& error) {
    // The other ranks wait for this one.
    MPI_Abort(MPI_COMM_WORLD, fail(error));
  }
  MPI_Finalize();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse_command(argc, argv, kDescription, Ranks::kGiven));
  } catch (const std::exception& error) {
    return fail(error);
  }
}
