// SPDX-License-Identifier: Apache-2.0
#include "tests/comm/worlds.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "normscope/comm/hosts.h"
#include "normscope/comm/self_communicator.h"
#include "normscope/comm/shared_memory_communicator.h"
#include "normscope/comm/shared_memory_segment.h"
#include "normscope/comm/thread_communicator.h"
#include "tests/support/ranks.h"

namespace normscope::testing {

void run_alone(int /*ranks*/, const ExchangeOptions& /*options*/, const CommunicatorBody& body) {
  body(*make_self_communicator());
}

void run_as_threads(int ranks, const ExchangeOptions& options, const CommunicatorBody& body) {
  std::vector<std::unique_ptr<Communicator>> communicators =
      make_thread_communicators(ranks, options);
  spawn_threads(ranks, [&](int rank) {
    const auto communicator = std::move(communicators[static_cast<std::size_t>(rank)]);
    body(*communicator);
  });
}

void run_as_processes(int ranks, const ExchangeOptions& options, const CommunicatorBody& body) {
  const SharedMemorySegment segment = SharedMemorySegment::create(ranks, options);
  spawn_processes(ranks, [&](int rank) { body(*make_shared_memory_communicator(segment, rank)); });
}

void run_as_threads_in_shared_memory(int ranks, const ExchangeOptions& options,
                                     const CommunicatorBody& body) {
  const SharedMemorySegment segment = SharedMemorySegment::create(ranks, options);
  spawn_threads(ranks, [&](int rank) { body(*make_shared_memory_communicator(segment, rank)); });
}

namespace {

// The same result as find_hosts() gives, for ranks that are threads.
Hosts hosts_of(int rank, int ranks, HostOfRank host_of,
               const std::vector<SharedMemorySegment>& memories) {
  Hosts hosts;
  for (int other = 0; other < ranks; ++other) {
    if (host_of(other) == host_of(rank)) hosts.members.push_back(other);
    int first = 0;
    while (host_of(first) != host_of(other)) ++first;
    if (first == other) hosts.leaders.push_back(other);
  }
  hosts.memory = memories.at(static_cast<std::size_t>(host_of(rank)));
  return hosts;
}

}  // namespace

RunRanks run_as_threads_on(HostOfRank host_of) {
  return [=](int ranks, const ExchangeOptions& options, const CommunicatorBody& body) {
    std::vector<int> sizes(static_cast<std::size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) ++sizes.at(static_cast<std::size_t>(host_of(rank)));
    std::vector<SharedMemorySegment> memories;
    for (const int size : sizes) {
      memories.push_back(SharedMemorySegment::create(std::max(size, 1), options));
    }
    std::vector<std::unique_ptr<Communicator>> groups = make_thread_communicators(ranks, options);
    spawn_threads(ranks, [&](int rank) {
      body(*over_hosts(std::move(groups[static_cast<std::size_t>(rank)]),
                       hosts_of(rank, ranks, host_of, memories)));
    });
  };
}

RunRanks run_as_processes_on(HostOfRank host_of) {
  return [=](int ranks, const ExchangeOptions& options, const CommunicatorBody& body) {
    const SharedMemorySegment segment = SharedMemorySegment::create(ranks, options);
    spawn_processes(ranks, [&](int rank) {
      setenv("NORMSCOPE_NODE", std::to_string(host_of(rank)).c_str(), /*overwrite=*/1);
      body(*over_hosts(make_shared_memory_communicator(segment, rank), options.time_limit));
    });
  };
}

}  // namespace normscope::testing
