// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>

#include <mpi.h>

#include "normscope/comm/communicator.h"
#include "normscope/core/export.h"

namespace normscope NORMSCOPE_EXPORT {

// The ranks of `ranks`, whose messages MPI carries. They travel on a duplicate, and never mix with
// the caller's own. Collective; no wait is longer than the time limit.
//
// MPI must have been initialized with MPI_THREAD_FUNNELED or more. With MPI_THREAD_FUNNELED every
// call comes from the thread that did so, with MPI_THREAD_SERIALIZED from any one at a time; groups
// that threads use at once need MPI_THREAD_MULTIPLE. Communicators should be destroyed before
// MPI_Finalize; one that is used after it throws, one that is destroyed after it does no harm.
//
// Throws ArgumentError where MPI is not initialized like that or `ranks` is no group of ranks
// (null, or an inter-communicator), CommunicationError where MPI reports an error, TimeoutError
// where ranks do not come.
[[nodiscard]] std::unique_ptr<Communicator> make_mpi_communicator(
    MPI_Comm ranks, std::chrono::milliseconds time_limit = std::chrono::minutes(10));

}  // namespace normscope
