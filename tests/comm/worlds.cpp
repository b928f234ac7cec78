// SPDX-License-Identifier: Apache-2.0
#include "tests/comm/worlds.h"

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

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

}  // namespace normscope::testing
