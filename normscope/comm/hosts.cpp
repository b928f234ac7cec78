// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/hosts.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "normscope/comm/processes.h"
#include "normscope/comm/shared_memory_communicator.h"
#include "normscope/core/environment.h"
#include "normscope/core/error.h"

namespace normscope {
namespace {

// float64 numbers in a slot if there are several hosts: 128 KiB. Each piece costs the latency of a
// message between hosts; shorter pieces do not gain enough from filling the slots in the meantime.
constexpr std::int64_t kSlotLengthOfSeveral = 16384;

Hosts hosts_of(const std::vector<double>& identities, int rank) {
  Hosts hosts;
  const double own = identities[static_cast<std::size_t>(rank)];
  for (auto identity = identities.begin(); identity != identities.end(); ++identity) {
    const auto number = static_cast<int>(identity - identities.begin());
    if (*identity == own) hosts.members.push_back(number);
    if (std::find(identities.begin(), identity, *identity) == identity) {
      hosts.leaders.push_back(number);
    }
  }
  return hosts;
}

void check_given(const std::unique_ptr<Communicator>& group) {
  if (!group) throw ArgumentError("group: expected a communicator, got a null pointer");
}

}  // namespace

Hosts find_hosts(Communicator& group, std::chrono::milliseconds time_limit) {
  check_environment_of(group);
  const double identity =
      uses_shared_memory() ? static_cast<double>(identity_of_process_ids()) : 0.0;
  const std::vector<double> identities = gather(group, {identity});
  Hosts hosts = hosts_of(identities, group.rank());
  const bool is_wanted_by_all = std::ranges::count(identities, 0.0) == 0;
  if (!is_wanted_by_all || std::ssize(hosts.leaders) == group.size()) return hosts;

  ExchangeOptions options{.time_limit = time_limit};
  if (!hosts.is_one()) options.slot_length = kSlotLengthOfSeveral;
  const MemoryOfPart memory = make_memory_of_part(group, hosts.members, options);
  if (memory.without.empty()) hosts.memory = memory.segment;
  return hosts;
}

std::unique_ptr<Communicator> over_hosts(std::unique_ptr<Communicator> group, const Hosts& hosts) {
  check_given(group);
  if (!hosts.memory) return group;
  if (hosts.is_one()) {
    auto shared = make_shared_memory_communicator(*hosts.memory, group->rank(), group->calls());
    // `shared` would not notice the death of a rank that has not joined it.
    group->all_reduce_sum({});
    return shared;
  }
  return make_two_level_communicator(std::move(group), hosts);
}

std::unique_ptr<Communicator> over_hosts(std::unique_ptr<Communicator> group,
                                         std::chrono::milliseconds time_limit) {
  check_given(group);
  const Hosts hosts = find_hosts(*group, time_limit);
  return over_hosts(std::move(group), hosts);
}

}  // namespace normscope
