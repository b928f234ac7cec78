// SPDX-License-Identifier: Apache-2.0
//
// Who is held to the contract. A line a transport, and one more where it has peers.
#include "tests/comm/communicator_contract.h"

namespace normscope::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Self, CommunicatorContract, worlds({1}, run_alone), ranks_of);
INSTANTIATE_TEST_SUITE_P(Threads, CommunicatorContract, worlds({1, 2, 3, 4, 8}, run_as_threads),
                         ranks_of);
INSTANTIATE_TEST_SUITE_P(Threads, PeersContract, worlds({2, 3, 4, 8}, run_as_threads), ranks_of);
INSTANTIATE_TEST_SUITE_P(SharedMemory, CommunicatorContract,
                         worlds({1, 2, 3, 4, 8}, run_as_processes), ranks_of);
INSTANTIATE_TEST_SUITE_P(SharedMemory, PeersContract, worlds({2, 3, 4, 8}, run_as_processes),
                         ranks_of);
INSTANTIATE_TEST_SUITE_P(SharedMemoryOfThreads, CommunicatorContract,
                         worlds({1, 2, 3, 4, 8}, run_as_threads_in_shared_memory), ranks_of);
INSTANTIATE_TEST_SUITE_P(SharedMemoryOfThreads, PeersContract,
                         worlds({2, 3, 4, 8}, run_as_threads_in_shared_memory), ranks_of);

}  // namespace
}  // namespace normscope::testing
