// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/communicator.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "normscope/core/environment.h"
#include "normscope/core/error.h"

namespace normscope {

void check_host_memory(const Communicator& communicator, Stream stream) {
  if (stream.memory == Memory::kHost) return;
  throw ArgumentError(std::string(communicator.transport()) +
                      ": expected values in the host's memory, got a device's");
}

std::vector<double> gather(Communicator& group, const std::vector<double>& own) {
  std::vector<double> rows = row_to_gather(group.rank(), group.size(), own);
  group.all_reduce_sum(rows);
  return rows;
}

void check_environment_of(Communicator& group) {
  try {
    check_environment();
  } catch (const ArgumentError& error) {
    group.fail(error.what());
    throw;
  }
}

std::vector<double> row_to_gather(int rank, int ranks, const std::vector<double>& own) {
  std::vector<double> rows(static_cast<std::size_t>(ranks) * own.size());
  std::ranges::copy(own, rows.begin() + rank * std::ssize(own));
  return rows;
}

std::vector<int> members_of_part(Communicator& whole, int color, int key) {
  // Every int is exact as a float64.
  const std::vector<double> rows =
      gather(whole, {static_cast<double>(color), static_cast<double>(key)});
  const auto row_of = [&](int rank) { return rows.begin() + 2 * rank; };
  std::vector<int> members;
  for (int rank = 0; rank < whole.size(); ++rank) {
    if (row_of(rank)[0] == color) members.push_back(rank);
  }
  std::ranges::stable_sort(members, {}, [&](int rank) { return row_of(rank)[1]; });
  return members;
}

int place_of(int rank, const std::vector<int>& members) {
  return static_cast<int>(std::ranges::find(members, rank) - members.begin());
}

}  // namespace normscope
