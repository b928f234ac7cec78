// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/exchanges.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "normscope/batch_norm/scope_exchange.h"
#include "normscope/comm/describe.h"
#include "normscope/comm/home_process.h"
#include "normscope/comm/shared_memory_between.h"
#include "normscope/core/error.h"
#include "normscope/core/resolution.h"
#include "normscope/core/scope.h"
#include "normscope/torch/arguments.h"
#include "normscope/torch/c10d_communicator.h"
#include "normscope/torch/call_watch.h"
#include "normscope/torch/environment.h"
#include "normscope/torch/errors.h"

namespace normscope::binding {

using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
using Milliseconds = std::chrono::milliseconds;

struct ExchangeEntry {
  ExchangeEntry() = default;
  // The threads of a communicator are not in a fork, and its connections are those of the rank.
  ~ExchangeEntry() {
    if (home.is_this_one()) return;
    [[maybe_unused]] const Exchange* const left = exchange.release();
  }
  ExchangeEntry(const ExchangeEntry&) = delete;
  ExchangeEntry& operator=(const ExchangeEntry&) = delete;

  HomeProcess home;
  std::mutex mutex;                    // held while the exchange is used
  std::unique_ptr<Exchange> exchange;  // nullptr: this rank shares with none
  at::Tensor report_memory;            // made at first use on a device
  DeviceReport* report = nullptr;
};

namespace {

using Entry = std::shared_ptr<ExchangeEntry>;

// A later group may have the name of one that was destroyed: the name is not enough to know it by.
struct GroupEntry {
  GroupEntry(const ProcessGroup& process_group, std::string its_name, const Placement& where,
             const HomeProcess& process)
      : group(process_group), name(std::move(its_name)), placement(where), home(process) {}
  GroupEntry(std::string its_name, Entry exchange)
      : name(std::move(its_name)), of_all(std::move(exchange)) {}

  c10::weak_intrusive_ptr<c10d::ProcessGroup> group{ProcessGroup()};  // none: a communicator's
  std::string name;     // as torch knows the process group, or the communicator's
  Placement placement;  // of the tensors that are normalized
  HomeProcess home;
  std::mutex mutex;  // of what follows, held while an exchange is made
  Entry of_all;      // all ranks of the group
  std::map<std::string, Entry> of_scope;
  std::map<std::vector<int>, Entry> of_leaders;
  std::map<std::string, std::string> norm_batches;  // and what they stand for
};

Milliseconds time_limit_of(c10d::ProcessGroup& group, const Placement& placement) {
  if (const auto chosen = chosen_time_limit()) return *chosen;
  const bool has_host = serves(group, c10::DeviceType::CPU);
  return group.getBackend(has_host ? c10::DeviceType::CPU : placement.device)
      ->getBackendOptions()
      ->timeout;
}

// What a group's own groups are for.
constexpr const char* kUseOnHost = "host";
constexpr const char* kUseOnDevice = "device";

// A process group that a program has in Python carries its own messages, too.
std::unique_ptr<OwnGroup> own_group_for(const GroupEntry& entry, const ProcessGroup& group,
                                        Milliseconds time_limit) {
  if (entry.name.starts_with(kRankGroup) || !serves(*group, c10::DeviceType::CPU)) return nullptr;
  const char* use = entry.placement.memory == Memory::kHost ? kUseOnHost : kUseOnDevice;
  return std::make_unique<OwnGroup>(group, entry.name, use, time_limit);
}

std::unique_ptr<Exchange> make_exchange(const GroupEntry& entry, const ProcessGroup& group) {
  const Milliseconds time_limit = time_limit_of(*group, entry.placement);
  watch_calls();
  auto over_torch = std::make_unique<C10dCommunicator>(group, entry.placement, time_limit,
                                                       own_group_for(entry, group, time_limit));
  std::unique_ptr<Communicator> shared;
  // On a device a call that has ended here has only been queued.
  const bool is_of_host = entry.placement.memory == Memory::kHost;
  if (is_of_host) shared = shared_memory_between(*over_torch, time_limit);
  if (is_of_host && !shared) {
    // The peers are to know by the time that they warn, or end their wait.
    over_torch->show_calls(std::min(time_limit, warning_limit().value_or(time_limit)) / 2);
  }
  // A group of one rank gets here only where that is forced.
  return std::make_unique<Exchange>(shared ? std::move(shared) : std::move(over_torch),
                                    WhenAlone::kExchange);
}

Entry entry_with(std::unique_ptr<Exchange> exchange) {
  auto entry = std::make_shared<ExchangeEntry>();
  entry->exchange = std::move(exchange);
  return entry;
}

// What follows is called with `group.mutex` held.

Entry exchange_of_all(GroupEntry& group, const Scope& scope, std::string_view layer) {
  if (group.of_all) return group.of_all;
  const ProcessGroup process_group = group.group.lock();
  if (!process_group) throw CommunicationError("the process group was destroyed");
  try {
    return group.of_all = entry_with(make_exchange(group, process_group));
  } catch (const CommunicationError& error) {
    const std::string user(layer.empty() ? "a layer without a name" : layer);
    throw CommunicationError("the group's first meeting, by " + user + " (scope " + scope.str() +
                             "): " + error.what());
  }
}

Entry exchange_of_leaders(GroupEntry& group, Exchange& all, const std::vector<int>& leaders) {
  const auto found = group.of_leaders.find(leaders);
  if (found != group.of_leaders.end()) return found->second;
  return group.of_leaders[leaders] = entry_with(make_part_of(all, leaders));
}

Entry exchange_of_scope(GroupEntry& group, const Scope& scope, std::string_view layer) {
  const std::string text = scope.str();
  const auto found = group.of_scope.find(text);
  if (found != group.of_scope.end()) return found->second;
  const Entry all = exchange_of_all(group, scope, layer);
  if (scope.kind() == Scope::Kind::kWorld) return group.of_scope[text] = all;
  const std::lock_guard lock(all->mutex);
  const std::vector<int> leaders = agree_on_leaders(*all->exchange, scope, layer);
  const bool is_world = std::ranges::count(leaders, 0) == std::ssize(leaders);
  return group.of_scope[text] =
             is_world ? all : exchange_of_leaders(group, *all->exchange, leaders);
}

std::string agreed_norm_batch(GroupEntry& group, const Scope& scope, std::int64_t samples) {
  const std::string text = scope.str();
  const auto found = group.norm_batches.find(text);
  if (found != group.norm_batches.end()) return found->second;
  const Entry all = exchange_of_all(group, scope, "");
  const std::lock_guard lock(all->mutex);
  const std::optional<Scope> resolved = agree_on_norm_batch(*all->exchange, scope, "", samples);
  // Batches without samples say nothing about those to come.
  if (!resolved) return Scope::world().str();
  return group.norm_batches[text] = resolved->str();
}

ProcessGroup resolve(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    TORCH_CHECK(false, "process_group: expected a process group of this process, got the name \"",
                name, "\"");
  }
}

template <class Key>
struct Groups {
  std::mutex mutex;
  std::map<Key, std::shared_ptr<GroupEntry>> entries;
};

auto& known_process_groups() {
  static Groups<std::pair<std::string, Placement>> groups;
  return groups;
}

auto& lent_communicators() {
  static Groups<std::string> groups;
  return groups;
}

// Takes groups out, for the caller to let go of them while no lock is held: a part's end may wait.
template <class Condition>
std::vector<std::shared_ptr<GroupEntry>> take_out(
    std::map<std::pair<std::string, Placement>, std::shared_ptr<GroupEntry>>& entries,
    const Condition& condition) {
  std::vector<std::shared_ptr<GroupEntry>> taken;
  std::erase_if(entries, [&](const auto& entry) {
    if (!condition(*entry.second)) return false;
    taken.push_back(entry.second);
    return true;
  });
  return taken;
}

bool is_destroyed(const GroupEntry& group) { return group.group.expired(); }

// Where process groups were known first: which of their processes the ranks are.
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

std::shared_ptr<GroupEntry> entry_of(std::string name, const ProcessGroup& group,
                                     const Placement& placement) {
  auto& [mutex, entries] = known_process_groups();
  std::vector<std::shared_ptr<GroupEntry>> destroyed;  // goes after the lock
  const std::lock_guard lock(mutex);
  const std::pair key(name, placement);
  const auto found = entries.find(key);
  if (found != entries.end() && found->second->group.lock() == group) return found->second;
  destroyed = take_out(entries, is_destroyed);
  const HomeProcess home = home_of(name, group);
  return entries[key] = std::make_shared<GroupEntry>(group, std::move(name), placement, home);
}

std::shared_ptr<GroupEntry> lent_communicator(const std::string& name) {
  auto& [mutex, entries] = lent_communicators();
  const std::lock_guard lock(mutex);
  const auto found = entries.find(name);
  return found == entries.end() ? nullptr : found->second;
}

bool sends(int ranks) { return ranks > 1 || forces_exchange(); }

// Where a group meets for what no tensor takes part in: on the host, unless it serves devices only.
Placement any_placement(const ProcessGroup& group) {
  if (serves(*group, c10::DeviceType::CPU)) return {};
  return {.memory = Memory::kDevice, .device = group->getDeviceTypes().front().type()};
}

// Before anything is waited for: what another thread held at the fork, it holds forever here.
void throw_if_forked(const HomeProcess& home, int rank, int size) {
  if (home.is_this_one()) return;
  const std::string text = home.text_for_fork(name_of_rank(rank, size));
  C10_THROW_ERROR(DistBackendError, text);
}

// The group called `name`, for tensors of this placement; nullptr where this rank is alone.
std::shared_ptr<GroupEntry> group_named(std::string_view name,
                                        const std::optional<Placement>& placement = std::nullopt) {
  if (name.empty()) return nullptr;
  std::string text(name);
  if (std::shared_ptr<GroupEntry> lent = lent_communicator(text)) {
    const Communicator& communicator = lent->of_all->exchange->communicator();
    if (!sends(communicator.size())) return nullptr;
    throw_if_forked(lent->home, communicator.rank(), communicator.size());
    return lent;
  }
  const ProcessGroup group = resolve(text);
  if (!sends(group->getSize())) return nullptr;
  auto entry = entry_of(std::move(text), group, placement ? *placement : any_placement(group));
  throw_if_forked(entry->home, group->getRank(), group->getSize());
  return entry;
}

Entry entry_of_scope(const std::shared_ptr<GroupEntry>& group, const Scope& scope,
                     std::string_view layer) {
  return as_torch([&] {
    const std::lock_guard lock(group->mutex);
    return exchange_of_scope(*group, scope, layer);
  });
}

}  // namespace

void lend_communicator(const std::string& name, std::unique_ptr<Communicator> communicator) {
  watch_calls();
  auto entry = std::make_shared<GroupEntry>(
      name, entry_with(std::make_unique<Exchange>(std::move(communicator), WhenAlone::kExchange)));
  auto& [mutex, entries] = lent_communicators();
  const std::lock_guard lock(mutex);
  entries[name] = std::move(entry);
}

void know_process_group(const std::string& name) {
  static_cast<void>(home_of(name, resolve(name)));
}

void take_communicator_back(const std::string& name) {
  auto& [mutex, entries] = lent_communicators();
  const std::lock_guard lock(mutex);
  entries.erase(name);
}

void forget_destroyed_groups() {
  auto& [mutex, entries] = known_process_groups();
  std::vector<std::shared_ptr<GroupEntry>> destroyed;
  const std::lock_guard lock(mutex);
  destroyed = take_out(entries, is_destroyed);
}

void forget_groups() {
  auto& [mutex, entries] = known_process_groups();
  std::vector<std::shared_ptr<GroupEntry>> all;
  const std::lock_guard lock(mutex);
  all = take_out(entries, [](const GroupEntry&) { return true; });
}

namespace {

bool is_of_one_rank(const Scope& scope) {
  return scope.kind() == Scope::Kind::kLocal || scope.kind() == Scope::Kind::kSlices;
}

// What is not a scope may have been meant for all ranks.
bool is_of_one_rank(std::string_view text) {
  try {
    return is_of_one_rank(Scope::parse(text));
  } catch (const ArgumentError&) {
    return false;
  }
}

// A rank that sends nothing is seen by peers that wait for it.
void show_call_alone(const CallName& call, std::string_view group_name,
                     const std::optional<Placement>& placement) {
  if (group_name.empty()) return;
  const std::string name(group_name);
  std::shared_ptr<GroupEntry> group = lent_communicator(name);
  if (!group && placement) {
    auto& [mutex, entries] = known_process_groups();
    const std::lock_guard lock(mutex);
    const auto found = entries.find({name, *placement});
    if (found != entries.end()) group = found->second;
  }
  if (!group || !group->home.is_this_one()) return;
  const std::unique_lock lock(group->mutex, std::try_to_lock);
  if (!lock || !group->of_all) return;
  CallBoard* const board = group->of_all->exchange->communicator().calls();
  if (board != nullptr) board->begin(call, CallState::kAlone);
}

// The peers of a rank with a scope that is none are told, too.
Scope parse_or_fail(const ScopedCall& call) {
  try {
    return parsed_scope(call.scope);
  } catch (const c10::Error& error) {
    fail_exchange(call.scope, call.group_name, error.what_without_backtrace());
    throw;
  }
}

}  // namespace

ExchangeUse::ExchangeUse(Direction direction, const ScopedCall& call,
                         const std::optional<Placement>& placement)
    : scope_(parse_or_fail(call)) {
  if (is_of_one_rank(scope_)) {
    show_call_alone({.what = name_of(direction), .layer = call.layer}, call.group_name, placement);
    return;
  }
  const std::shared_ptr<GroupEntry> group = group_named(call.group_name, placement);
  if (!group) return;
  entry_ = entry_of_scope(group, scope_, call.layer);
  lock_ = std::unique_lock(entry_->mutex);
  exchange_ = entry_->exchange.get();
}

namespace {

// Those that this process has taken part in.
std::vector<std::shared_ptr<GroupEntry>> groups_here() {
  std::vector<std::shared_ptr<GroupEntry>> groups;
  const auto add = [&](const std::shared_ptr<GroupEntry>& group) {
    if (group->home.is_this_one()) groups.push_back(group);
  };
  {
    auto& [mutex, entries] = known_process_groups();
    const std::lock_guard lock(mutex);
    for (const auto& [key, group] : entries) {
      if (!is_destroyed(*group)) add(group);
    }
  }
  auto& [mutex, entries] = lent_communicators();
  const std::lock_guard lock(mutex);
  for (const auto& [name, group] : entries) add(group);
  return groups;
}

void fail(const Entry& entry, std::string_view reason) {
  if (!entry) return;
  const std::lock_guard use(entry->mutex);
  if (entry->exchange) entry->exchange->fail(reason);
}

void refuse_first_meeting(const std::string& name, std::string_view reason) {
  const ProcessGroup group = resolve(name);
  if (!home_of(name, group).is_this_one()) return;
  if (!sends(group->getSize()) || !serves(*group, c10::DeviceType::CPU)) return;
  for (const char* use : {kUseOnHost, kUseOnDevice}) OwnGroup::refuse(*group, name, use, reason);
}

}  // namespace

void fail_exchange(std::string_view scope, std::string_view group_name, std::string_view reason) {
  if (group_name.empty() || is_of_one_rank(scope)) return;
  bool has_met = false;
  for (const std::shared_ptr<GroupEntry>& group : groups_here()) {
    if (group->name != group_name) continue;
    has_met = true;
    const std::lock_guard lock(group->mutex);
    const auto found = group->of_scope.find(std::string(scope));
    fail(found != group->of_scope.end() ? found->second : group->of_all, reason);
  }
  if (!has_met) refuse_first_meeting(std::string(group_name), reason);
}

void fail_all_exchanges(std::string_view reason) {
  for (const std::shared_ptr<GroupEntry>& group : groups_here()) {
    const std::lock_guard lock(group->mutex);
    fail(group->of_all, reason);
    for (const auto& [leaders, entry] : group->of_leaders) fail(entry, reason);
  }
}

DeviceReport* ExchangeUse::report() const {
  if (exchange_ == nullptr) return nullptr;
  if (entry_->report == nullptr) {
    static_assert(sizeof(DeviceReport) % sizeof(std::int32_t) == 0);
    entry_->report_memory = zeros_for_report(sizeof(DeviceReport) / sizeof(std::int32_t));
    entry_->report = new (entry_->report_memory.mutable_data_ptr()) DeviceReport;
  }
  return entry_->report;
}

std::string resolve_scope(std::string_view scope, std::string_view group_name,
                          std::int64_t samples) {
  return as_torch([&] {
    const Scope parsed = Scope::parse(scope);
    if (parsed.kind() != Scope::Kind::kNormBatch) return parsed.str();
    const std::shared_ptr<GroupEntry> group = group_named(group_name);
    if (!group) return resolve_norm_batch(parsed, samples, 1).str();
    const std::lock_guard lock(group->mutex);
    return agreed_norm_batch(*group, parsed, samples);
  });
}

std::vector<std::int64_t> gather_samples_of_group(std::string_view group_name, std::int64_t own) {
  return as_torch([&]() -> std::vector<std::int64_t> {
    const ExchangeUse use(Direction::kStep, {"world", group_name, "joined batches"});
    if (use.get() == nullptr) return {own};
    return gather_samples(*use.get(), own);
  });
}

at::Tensor gather(const at::Tensor& own, std::string_view group_name, std::string_view what) {
  TORCH_CHECK_VALUE(own.dim() == 1 && own.scalar_type() == at::kDouble && own.is_cpu(),
                    "own: expected float64 numbers [n] on the CPU");
  return as_torch([&]() -> at::Tensor {
    const ExchangeUse use(Direction::kParameters, {"world", group_name, what});
    if (use.get() == nullptr) return own.unsqueeze(0).clone();
    const Communicator& group = use.get()->communicator();
    // Every rank adds to zeros, so that the sum gathers.
    const std::int64_t numbers = group.size() * own.size(0);
    const at::Tensor message =
        at::zeros({numbers + kHeaderSize}, at::TensorOptions().dtype(at::kDouble));
    const at::Tensor all = message.narrow(0, 0, numbers).view({group.size(), own.size(0)});
    all[group.rank()].copy_(own);
    use.get()->all_reduce(
        {.layer = what,
         .scope = "world",
         .direction = Direction::kParameters,
         .channels = own.size(0)},
        {message.mutable_data_ptr<double>(), static_cast<std::size_t>(message.numel())}, {});
    return all;
  });
}

std::string transport_of(std::string_view group_name) {
  const std::shared_ptr<GroupEntry> group = group_named(group_name);
  if (!group) return "none";
  const Entry all = entry_of_scope(group, Scope::world(), "");
  const std::lock_guard lock(all->mutex);
  return std::string(all->exchange->communicator().transport());
}

}  // namespace normscope::binding
