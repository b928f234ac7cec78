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

namespace normscope::testing {

using CommunicatorBody = std::function<void(Communicator& communicator)>;

// A way to run a group of ranks: what a transport adds to be held to the contract.
using RunRanks = void (*)(int ranks, const ExchangeOptions& options, const CommunicatorBody& body);

void run_alone(int ranks, const ExchangeOptions& options, const CommunicatorBody& body);
void run_as_threads(int ranks, const ExchangeOptions& options, const CommunicatorBody& body);

// Shared memory between processes, and, so that a race detector sees all ranks, between threads.
void run_as_processes(int ranks, const ExchangeOptions& options, const CommunicatorBody& body);
void run_as_threads_in_shared_memory(int ranks, const ExchangeOptions& options,
                                     const CommunicatorBody& body);

// Ranks on several hosts: two ranks a host, or two hosts that get the ranks in turn. Of threads the
// memory of a host is a segment that some of them use; processes find their hosts by
// NORMSCOPE_NODE.
void run_as_threads_in_pairs(int ranks, const ExchangeOptions& options,
                             const CommunicatorBody& body);
void run_as_threads_on_two_hosts(int ranks, const ExchangeOptions& options,
                                 const CommunicatorBody& body);
void run_as_processes_in_pairs(int ranks, const ExchangeOptions& options,
                               const CommunicatorBody& body);
void run_as_processes_on_two_hosts(int ranks, const ExchangeOptions& options,
                                   const CommunicatorBody& body);

// What can hold some of its ranks.
using MakeGate = std::unique_ptr<Gate> (*)();

inline std::unique_ptr<Gate> make_pipe_gate() { return std::make_unique<PipeGate>(); }

struct World {
  int ranks;
  RunRanks run;
  MakeGate make_gate = make_pipe_gate;
  std::vector<int> peers_of_rank_0 = {};  // whose absence it sees by itself; none: all
};

// One test for each number of ranks.
inline auto worlds(const std::vector<int>& sizes, RunRanks run) {
  std::vector<World> worlds;
  for (const int ranks : sizes) worlds.push_back({.ranks = ranks, .run = run});
  return ::testing::ValuesIn(worlds);
}

inline auto worlds_of_pairs(const std::vector<int>& sizes, RunRanks run) {
  std::vector<World> worlds;
  for (const int ranks : sizes) {
    worlds.push_back({.ranks = ranks, .run = run, .peers_of_rank_0 = {1}});
  }
  return ::testing::ValuesIn(worlds);
}

inline auto worlds_of_two_hosts(const std::vector<int>& sizes, RunRanks run) {
  std::vector<World> worlds;
  for (const int ranks : sizes) {
    worlds.push_back({.ranks = ranks, .run = run});
    for (int rank = 2; rank < ranks; rank += 2) worlds.back().peers_of_rank_0.push_back(rank);
  }
  return ::testing::ValuesIn(worlds);
}

// What follows the name of a test.
inline std::string ranks_of(const ::testing::TestParamInfo<World>& world) {
  return std::to_string(world.param.ranks);
}

// The ranks' `own` values, in the order of the ranks.
inline std::vector<double> gather(Communicator& communicator, double own) {
  std::vector<double> values(static_cast<std::size_t>(communicator.size()));
  values[static_cast<std::size_t>(communicator.rank())] = own;
  communicator.all_reduce_sum(values);
  return values;
}

inline double sum_of_ranks(const Communicator& communicator) {
  return communicator.size() * (communicator.size() - 1) / 2.0;
}

// The same, as exchanged.
inline double exchanged_sum_of_ranks(Communicator& communicator) {
  std::vector<double> value{static_cast<double>(communicator.rank())};
  communicator.all_reduce_sum(value);
  return value[0];
}

// The text of the `Expected` that `call` must throw.
template <class Expected, class Call>
std::string text_of(const Call& call) {
  try {
    call();
  } catch (const Expected& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

}  // namespace normscope::testing
