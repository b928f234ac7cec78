// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/groups/registry.h"

#include <map>
#include <mutex>
#include <utility>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "normscope/comm/describe.h"
#include "normscope/comm/processes.h"
#include "normscope/core/environment.h"
#include "normscope/kernels/kernels.h"
#include "normscope/torch/c10d/communicator.h"
#include "normscope/torch/errors.h"
#include "normscope/torch/groups/watched_calls.h"

namespace normscope::binding {
namespace {

using Group = std::shared_ptr<GroupExchanges>;

// By name and, for process groups, by placement; registered communicators have none.
using GroupKey = std::pair<std::string, std::optional<Placement>>;

struct Groups {
  std::mutex mutex;
  std::map<GroupKey, Group> entries;
};

Groups& groups() {
  static Groups groups;
  return groups;
}

// Takes process groups out of the map. The caller releases them after unlocking: ending a part may
// wait.
std::vector<Group> take_out(std::map<GroupKey, Group>& entries, bool only_destroyed) {
  std::vector<Group> taken;
  std::erase_if(entries, [&](const auto& entry) {
    const auto& [key, group] = entry;
    if (!key.second || (only_destroyed && !group->is_destroyed())) return false;
    taken.push_back(group);
    return true;
  });
  return taken;
}

// nullptr if it is not in the map.
Group group_of(const GroupKey& key) {
  auto& [mutex, entries] = groups();
  const std::lock_guard lock(mutex);
  const auto found = entries.find(key);
  return found == entries.end() ? nullptr : found->second;
}

Group registered_communicator(const std::string& name) { return group_of({name, std::nullopt}); }

ProcessGroup resolve(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    TORCH_CHECK(false, "process_group: expected a process group of this process, got the name \"",
                name, "\"");
  }
}

// The process in which a process group first became known: the ranks' own processes.
struct KnownGroup {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  HomeProcess home;
};

HomeProcess home_of(const std::string& name, const ProcessGroup& group) {
  static std::mutex mutex;
  static std::map<std::string, KnownGroup> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(name);
  if (found != known.end() && found->second.group.lock() == group) return found->second.home;
  std::erase_if(known, [](const auto& entry) { return entry.second.group.expired(); });
  const HomeProcess here;
  known.insert_or_assign(name, KnownGroup{.group = c10::weak_intrusive_ptr(group), .home = here});
  return here;
}

Group exchanges_of(const std::string& name, const ProcessGroup& group, const Placement& placement) {
  auto& [mutex, entries] = groups();
  std::vector<Group> destroyed;  // released after the lock
  const std::lock_guard lock(mutex);
  const auto found = entries.find({name, placement});
  if (found != entries.end() && found->second->is_of(group)) return found->second;
  destroyed = take_out(entries, /*only_destroyed=*/true);
  // Before the group is known: peers are then notified in the rendezvous.
  as_torch(check_all_variables);
  const HomeProcess home = home_of(name, group);
  return entries[{name, placement}] =
             std::make_shared<GroupExchanges>(group, name, placement, home);
}

bool sends(int ranks) { return ranks > 1 || as_torch(forces_exchange); }

// Where a group exchanges if no tensor takes part: on the host, unless it serves devices only.
Placement any_placement(const ProcessGroup& group) {
  if (serves(*group, c10::DeviceType::CPU)) return {};
  return {.memory = Memory::kDevice, .device = group->getDeviceTypes().front().type()};
}

// Comes before all locks: if another thread held one at the fork, nobody releases it here.
void throw_if_forked(const GroupExchanges& group) {
  if (group.home().is_this_one()) return;
  const std::string text = group.home().text_for_fork(name_of_rank(group.rank(), group.size()));
  C10_THROW_ERROR(DistBackendError, text);
}

}  // namespace

void register_communicator(const std::string& name, std::unique_ptr<Communicator> communicator) {
  check_environment_of(*communicator);
  watch_calls();
  auto group = std::make_shared<GroupExchanges>(name, std::move(communicator));
  auto& [mutex, entries] = groups();
  const std::lock_guard lock(mutex);
  entries[{name, std::nullopt}] = std::move(group);
}

void unregister_communicator(const std::string& name) {
  auto& [mutex, entries] = groups();
  std::map<GroupKey, Group>::node_type unregistered;  // released after the lock
  const std::lock_guard lock(mutex);
  unregistered = entries.extract({name, std::nullopt});
}

void forget_groups(bool only_destroyed) {
  auto& [mutex, entries] = groups();
  std::vector<Group> forgotten;  // released after the lock
  const std::lock_guard lock(mutex);
  forgotten = take_out(entries, only_destroyed);
}

void know_process_group(const std::string& name) {
  static_cast<void>(home_of(name, resolve(name)));
}

Group group_named(std::string_view name, const std::optional<Placement>& placement) {
  if (name.empty()) return nullptr;
  const std::string text(name);
  Group group = registered_communicator(text);
  if (group) {
    if (!sends(group->size())) return nullptr;
  } else {
    const ProcessGroup of_torch = resolve(text);
    if (!sends(of_torch->getSize())) return nullptr;
    group = exchanges_of(text, of_torch, placement ? *placement : any_placement(of_torch));
  }
  throw_if_forked(*group);
  return group;
}

bool has_peers(std::string_view name) {
  if (name.empty()) return false;
  const std::string text(name);
  const Group communicator = registered_communicator(text);
  return sends(communicator ? communicator->size() : resolve(text)->getSize());
}

bool serves(std::string_view name, c10::DeviceType device) {
  if (name.empty() || device == c10::DeviceType::CPU) return true;
  const std::string text(name);
  return registered_communicator(text) == nullptr && carrier_of(*resolve(text), device) == device;
}

Group used_group_named(std::string_view name, const std::optional<Placement>& placement) {
  if (name.empty()) return nullptr;
  const std::string text(name);
  Group group = registered_communicator(text);
  if (!group && placement) group = group_of({text, placement});
  return group && group->home().is_this_one() ? group : nullptr;
}

std::vector<Group> used_groups() {
  std::vector<Group> used;
  auto& [mutex, entries] = groups();
  const std::lock_guard lock(mutex);
  for (const auto& [key, group] : entries) {
    const bool is_destroyed = key.second && group->is_destroyed();
    if (!is_destroyed && group->home().is_this_one()) used.push_back(group);
  }
  return used;
}

void fail_rendezvous(const std::string& name, std::string_view reason) {
  const ProcessGroup group = resolve(name);
  if (!home_of(name, group).is_this_one() || !sends(group->getSize())) return;
  OwnGroup::refuse(*group, name, reason);
}

}  // namespace normscope::binding
