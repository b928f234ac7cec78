// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/exchanges.h"

#include <charconv>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <unordered_map>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "normscope/comm/shared_memory_communicator.h"
#include "normscope/core/error.h"
#include "normscope/torch/c10d_communicator.h"

namespace normscope::binding {

using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
using Milliseconds = std::chrono::milliseconds;

// A later group may have the name of one that was destroyed: the name is not enough to know it by.
struct GroupEntry {
  explicit GroupEntry(const ProcessGroup& process_group) : group(process_group) {}

  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  std::mutex mutex;  // held while the exchange is made or used
  std::unique_ptr<Exchange> exchange;
};

namespace {

std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// NORMSCOPE_TIMEOUT, none where it is not set.
std::optional<Milliseconds> chosen_time_limit() {
  const std::string_view text = environment("NORMSCOPE_TIMEOUT");
  if (text.empty()) return std::nullopt;
  double seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  // Milliseconds of more than 30 years are no limit, and would overflow in a clock's sums.
  const bool fits =
      error == std::errc{} && end == text.data() + text.size() && seconds >= 1e-3 && seconds <= 1e9;
  TORCH_CHECK_VALUE(fits, "NORMSCOPE_TIMEOUT: expected seconds from 0.001 to 1e9, got \"", text,
                    "\"");
  return Milliseconds(static_cast<std::int64_t>(seconds * 1e3));
}

Milliseconds time_limit_of(c10d::ProcessGroup& group) {
  return group.getBackend(c10::DeviceType::CPU)->getBackendOptions()->timeout;
}

std::unique_ptr<Communicator> join(const SharedMemoryAddress& address, int rank) {
  try {
    return make_shared_memory_communicator(SharedMemorySegment::open(address), rank);
  } catch (const Error&) {
    return nullptr;  // another host, or a process that may not look into rank 0's
  }
}

// Shared memory between the ranks of `group` where all of them can reach it, else nullptr.
// Collective: every rank makes the same two exchanges whatever it finds, so that no disagreement
// about hosts, permissions or the environment can leave a peer waiting.
std::unique_ptr<Communicator> shared_memory_between(Communicator& group, Milliseconds time_limit) {
  const bool wanted = environment("NORMSCOPE_SHARED_MEMORY") != "0";
  std::optional<SharedMemorySegment> segment;
  SharedMemoryAddress address;
  if (wanted && group.rank() == 0) {
    try {
      segment = SharedMemorySegment::create(group.size(), {.time_limit = time_limit});
      address = segment->address();
    } catch (const Error&) {
      // No memory or descriptor is left: the address stays zero, and nobody joins.
    }
  }

  double gathered[] = {static_cast<double>(address.process),
                       static_cast<double>(address.descriptor), static_cast<double>(address.nonce)};
  group.all_reduce_sum(gathered);
  address = {static_cast<std::int64_t>(gathered[0]), static_cast<std::int64_t>(gathered[1]),
             static_cast<std::int64_t>(gathered[2])};

  std::unique_ptr<Communicator> joined;
  if (wanted && address.process != 0) joined = join(address, group.rank());
  double votes[] = {joined ? 1.0 : 0.0};
  group.all_reduce_sum(votes);
  return votes[0] == group.size() ? std::move(joined) : nullptr;
}

std::unique_ptr<Exchange> make_exchange(const ProcessGroup& group) {
  const std::optional<Milliseconds> chosen = chosen_time_limit();
  auto own = std::make_unique<C10dCommunicator>(group, chosen);
  std::unique_ptr<Communicator> shared =
      shared_memory_between(*own, chosen ? *chosen : time_limit_of(*group));
  // A group of one rank gets here only where that is forced.
  return std::make_unique<Exchange>(shared ? std::move(shared) : std::move(own),
                                    WhenAlone::kExchange);
}

// make_exchange() whose errors have the type that torch's own have in Python.
std::unique_ptr<Exchange> make_exchange_as_torch(const ProcessGroup& group) {
  try {
    return make_exchange(group);
  } catch (const CommunicationError& error) {
    C10_THROW_ERROR(DistBackendError, std::string("the group's first meeting: ") + error.what());
  }
}

ProcessGroup resolve(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    TORCH_CHECK(false, "process_group: expected a process group of this process, got the name \"",
                name, "\"");
  }
}

std::shared_ptr<GroupEntry> entry_of(const std::string& name, const ProcessGroup& group) {
  static std::mutex mutex;
  static std::unordered_map<std::string, std::shared_ptr<GroupEntry>> entries;
  const std::lock_guard lock(mutex);
  const auto found = entries.find(name);
  if (found != entries.end() && found->second->group.lock() == group) return found->second;
  std::erase_if(entries, [](const auto& entry) { return entry.second->group.expired(); });
  return entries[name] = std::make_shared<GroupEntry>(group);
}

}  // namespace

ExchangeUse::ExchangeUse(std::string_view group_name) {
  if (group_name.empty()) return;
  const std::string name(group_name);
  const ProcessGroup group = resolve(name);
  if (group->getSize() == 1 && environment("NORMSCOPE_FORCE_SYNC") != "1") return;
  entry_ = entry_of(name, group);
  lock_ = std::unique_lock(entry_->mutex);
  if (!entry_->exchange) entry_->exchange = make_exchange_as_torch(group);
  exchange_ = entry_->exchange.get();
}

std::string transport_of(std::string_view group_name) {
  const ExchangeUse use(group_name);
  return use.get() == nullptr ? "none" : std::string(use.get()->communicator().transport());
}

}  // namespace normscope::binding
