// SPDX-License-Identifier: Apache-2.0
//
// Instantiates the contract: one line per transport, and a second one if it has peers.
#include "tests/comm/communicator_contract.h"

namespace normscope::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Self, CommunicatorContract, worlds({1}, run_alone), ranks_of);
INSTANTIATE_TEST_SUITE_P(Threads, CommunicatorContract, worlds({1, 2, 3, 8}, run_as_threads),
                         ranks_of);
INSTANTIATE_TEST_SUITE_P(Threads, PeersContract, worlds({2, 3, 8}, run_as_threads), ranks_of);
INSTANTIATE_TEST_SUITE_P(SharedMemory, CommunicatorContract, worlds({1, 2, 3, 8}, run_as_processes),
                         ranks_of);
INSTANTIATE_TEST_SUITE_P(SharedMemory, PeersContract, worlds({2, 3, 8}, run_as_processes),
                         ranks_of);
INSTANTIATE_TEST_SUITE_P(SharedMemoryOfThreads, CommunicatorContract,
                         worlds({1, 2, 3, 8}, run_as_threads_in_shared_memory), ranks_of);
INSTANTIATE_TEST_SUITE_P(SharedMemoryOfThreads, PeersContract,
                         worlds({2, 3, 8}, run_as_threads_in_shared_memory), ranks_of);

// On two levels. With three ranks, one of them is alone on its host.
INSTANTIATE_TEST_SUITE_P(PairsOfThreads, CommunicatorContract,
                         worlds_on(pairs, {2, 3, 8}, run_as_threads_on), ranks_of);
INSTANTIATE_TEST_SUITE_P(PairsOfThreads, PeersContract, worlds_on(pairs, {3, 8}, run_as_threads_on),
                         ranks_of);
INSTANTIATE_TEST_SUITE_P(TwoHostsOfThreads, CommunicatorContract,
                         worlds_on(two_hosts, {3, 8}, run_as_threads_on), ranks_of);
INSTANTIATE_TEST_SUITE_P(TwoHostsOfThreads, PeersContract,
                         worlds_on(two_hosts, {3, 8}, run_as_threads_on), ranks_of);
INSTANTIATE_TEST_SUITE_P(Pairs, CommunicatorContract,
                         worlds_on(pairs, {2, 3, 8}, run_as_processes_on), ranks_of);
INSTANTIATE_TEST_SUITE_P(Pairs, PeersContract, worlds_on(pairs, {3, 8}, run_as_processes_on),
                         ranks_of);

}  // namespace
}  // namespace normscope::testing
