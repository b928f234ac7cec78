// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/hosts.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "normscope/comm/processes.h"
#include "normscope/comm/shared_memory_communicator.h"
#include "normscope/comm/two_level_communicator.h"
#include "normscope/core/error.h"
#include "normscope/core/hash.h"

namespace normscope {
namespace {

// float64 numbers in a slot if there are several hosts: 128 KiB. Each piece costs the latency of a
// message between hosts; shorter pieces do not gain enough from filling the slots in the meantime.
constexpr std::int64_t kSlotLengthOfSeveral = 16384;

bool is_wanted() {
  const char* chosen = std::getenv("NORMSCOPE_SHARED_MEMORY");
  return chosen == nullptr || std::string_view(chosen) != "0";
}

// Equal for processes of one host that can see each other.
double identity_of_memory() {
  Hash hash;
  hash.add(std::to_string(host_identity()));
  hash.add(std::to_string(own_pid_namespace()));
  return static_cast<double>(hash.low_bits(kIdentityBits));
}

// Gathers: row r of the result is the `own` of rank r. Each rank adds a matrix that is zero outside
// its own row.
std::vector<double> gather(Communicator& group, std::span<const double> own) {
  std::vector<double> rows(static_cast<std::size_t>(group.size()) * own.size());
  std::ranges::copy(own,
                    rows.begin() + static_cast<std::ptrdiff_t>(group.rank()) * std::ssize(own));
  group.all_reduce_sum(rows);
  return rows;
}

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

std::vector<double> row_of(const std::optional<SharedMemorySegment>& segment) {
  const SharedMemoryAddress address = segment ? segment->address() : SharedMemoryAddress{};
  return {static_cast<double>(address.process), static_cast<double>(address.descriptor),
          static_cast<double>(address.nonce)};
}

// Empty on an error: the other ranks must be told before anything is thrown.
template <class Make>
std::optional<SharedMemorySegment> try_to(const Make& make) {
  try {
    return make();
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace

Hosts find_hosts(Communicator& group, std::chrono::milliseconds time_limit) {
  const double identity = is_wanted() ? identity_of_memory() : 0.0;
  const std::vector<double> identities = gather(group, std::span(&identity, 1));
  Hosts hosts = hosts_of(identities, group.rank());
  const bool is_wanted_by_all = std::ranges::count(identities, 0.0) == 0;
  if (!is_wanted_by_all || std::ssize(hosts.leaders) == group.size()) return hosts;

  const bool leads = hosts.members.front() == group.rank();
  if (leads) {
    ExchangeOptions options{.time_limit = time_limit};
    if (!hosts.is_one()) options.slot_length = kSlotLengthOfSeveral;
    hosts.memory = try_to([&] {
      return SharedMemorySegment::create(static_cast<int>(hosts.members.size()), options);
    });
  }
  const std::vector<double> rows = gather(group, row_of(hosts.memory));
  const auto row = std::span(rows).subspan(3 * static_cast<std::size_t>(hosts.members.front()), 3);
  const SharedMemoryAddress address{.process = static_cast<std::int64_t>(row[0]),
                                    .descriptor = static_cast<std::int64_t>(row[1]),
                                    .nonce = static_cast<std::int64_t>(row[2])};
  if (!leads && address.process != 0) {
    hosts.memory = try_to([&] { return SharedMemorySegment::open(address); });
  }
  double votes[] = {hosts.memory ? 1.0 : 0.0};
  group.all_reduce_sum(votes);
  if (votes[0] != group.size()) hosts.memory.reset();
  return hosts;
}

std::unique_ptr<Communicator> over_hosts(std::unique_ptr<Communicator> group, const Hosts& hosts) {
  if (!hosts.memory) return group;
  if (hosts.is_one()) {
    return make_shared_memory_communicator(*hosts.memory, group->rank(), group->calls());
  }
  return make_two_level_communicator(std::move(group), hosts);
}

std::unique_ptr<Communicator> over_hosts(std::unique_ptr<Communicator> group,
                                         std::chrono::milliseconds time_limit) {
  const Hosts hosts = find_hosts(*group, time_limit);
  return over_hosts(std::move(group), hosts);
}

}  // namespace normscope
