// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>

#include <mpi.h>

#include "normscope/comm/communicator.h"
#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// A communicator over MPI, of the ranks of `ranks`. It uses a duplicate of `ranks`: its messages
// never mix with the caller's. Collective; no wait exceeds the time limit.
//
// MPI must have been initialized with MPI_THREAD_FUNNELED or more. With MPI_THREAD_FUNNELED, only
// the thread that initialized MPI may call; with MPI_THREAD_SERIALIZED, any one thread at a time.
// If threads use several groups at once, MPI_THREAD_MULTIPLE is needed. After a fail() in a thread
// that must not call MPI, the peers are notified when another thread next uses or destroys the
// communicator. Destroy communicators before MPI_Finalize: a use after it throws, a destruction
// after it does no harm.
//
// Throws ArgumentError if MPI is not initialized like that, or if `ranks` is MPI_COMM_NULL or an
// inter-communicator; CommunicationError on errors of MPI; TimeoutError if ranks are missing.
[[nodiscard]] std::unique_ptr<Communicator> make_mpi_communicator(
    MPI_Comm ranks, std::chrono::milliseconds time_limit = std::chrono::minutes(10));

}  // namespace normscope
