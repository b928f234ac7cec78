// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "normscope/comm/communicator.h"
#include "normscope/comm/exchange_options.h"
#include "tests/support/ranks.h"
#include "tests/support/text_of.h"

namespace normscope::testing {

using CommunicatorBody = std::function<void(Communicator& communicator)>;

// Runs a group of ranks over a transport. Each transport that is tested needs one.
using RunRanks =
    std::function<void(int ranks, const ExchangeOptions& options, const CommunicatorBody& body)>;

void run_alone(int ranks, const ExchangeOptions& options, const CommunicatorBody& body);
void run_as_threads(int ranks, const ExchangeOptions& options, const CommunicatorBody& body);

// Shared memory between processes, and between threads: there a race detector sees all ranks.
void run_as_processes(int ranks, const ExchangeOptions& options, const CommunicatorBody& body);
void run_as_threads_in_shared_memory(int ranks, const ExchangeOptions& options,
                                     const CommunicatorBody& body);

// Ranks on several hosts: two ranks per host, or two hosts with the even and the odd ranks.
using HostOfRank = int (*)(int rank);
inline int pairs(int rank) { return rank / 2; }
inline int two_hosts(int rank) { return rank % 2; }

// Threads of one host share a segment; processes find their hosts by NORMSCOPE_NODE.
RunRanks run_as_threads_on(HostOfRank host_of);
RunRanks run_as_processes_on(HostOfRank host_of);

// Makes a gate that ranks of a world can wait at.
using MakeGate = std::unique_ptr<Gate> (*)();

inline std::unique_ptr<Gate> make_pipe_gate() { return std::make_unique<PipeGate>(); }

struct World {
  int ranks;
  RunRanks run;
  MakeGate make_gate = make_pipe_gate;
  // Those it waits for itself; empty: all. GCC warns about aggregates without the initializer.
  std::vector<int> peers_of_rank_0 = {};  // NOLINT(readability-redundant-member-init)
};

// One test for each number of ranks.
inline auto worlds(const std::vector<int>& sizes, const RunRanks& run) {
  std::vector<World> worlds;
  for (const int ranks : sizes) worlds.push_back({.ranks = ranks, .run = run});
  return ::testing::ValuesIn(worlds);
}

// The same over several hosts. Rank 0 waits for the other ranks of its host.
inline auto worlds_on(HostOfRank host_of, const std::vector<int>& sizes,
                      RunRanks (*run_on)(HostOfRank)) {
  std::vector<World> worlds;
  for (const int ranks : sizes) {
    worlds.push_back({.ranks = ranks, .run = run_on(host_of)});
    for (int rank = 1; rank < ranks; ++rank) {
      if (host_of(rank) == host_of(0)) worlds.back().peers_of_rank_0.push_back(rank);
    }
  }
  return ::testing::ValuesIn(worlds);
}

// The suffix of a test's name.
inline std::string ranks_of(const ::testing::TestParamInfo<World>& world) {
  return std::to_string(world.param.ranks);
}

// The `own` values of all ranks, in rank order.
inline std::vector<double> gather(Communicator& communicator, double own) {
  return normscope::gather(communicator, {own});
}

inline double sum_of_ranks(const Communicator& communicator) {
  return communicator.size() * (communicator.size() - 1) / 2.0;
}

// The same sum, computed by an exchange.
inline double exchanged_sum_of_ranks(Communicator& communicator) {
  std::vector<double> value{static_cast<double>(communicator.rank())};
  communicator.all_reduce_sum(value);
  return value[0];
}

[[nodiscard]] inline bool is_last(const Communicator& communicator) {
  return communicator.rank() == communicator.size() - 1;
}

}  // namespace normscope::testing
