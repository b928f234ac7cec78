// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/groups/group_exchanges.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <optional>
#include <utility>

#include <c10/util/ScopeExit.h>

#include "normscope/batch_norm/scope_exchange.h"
#include "normscope/comm/hosts.h"
#include "normscope/core/environment.h"
#include "normscope/core/error.h"
#include "normscope/torch/c10d/communicator.h"
#include "normscope/torch/errors.h"
#include "normscope/torch/groups/watched_calls.h"

namespace normscope::binding {
namespace {

using Milliseconds = std::chrono::milliseconds;

Milliseconds time_limit_of(c10d::ProcessGroup& group, const Placement& placement) {
  if (const auto chosen = chosen_time_limit()) return *chosen;
  const bool has_host = serves(group, c10::DeviceType::CPU);
  const auto backend = group.getBackend(has_host ? c10::DeviceType::CPU : placement.device);
  const auto options = backend->getBackendOptions();
  TORCH_CHECK(options, "process_group: expected a backend whose options tell its time limit, got ",
              backend->getBackendName(), ", which has none; set NORMSCOPE_TIMEOUT to give a limit");
  return options->timeout;
}

// A process group of a Python program also carries the program's own messages. Those of normscope
// need a group of their own.
std::shared_ptr<OwnGroup> own_group_of(c10d::ProcessGroup& group, const std::string& name,
                                       const Placement& placement, Milliseconds time_limit) {
  if (name.starts_with(kRankGroup)) return nullptr;
  const bool is_host = carrier_of(group, placement.device) == c10::DeviceType::CPU;
  const auto use = is_host ? OwnGroup::Use::kHost : OwnGroup::Use::kDevices;
  return std::make_shared<OwnGroup>(group, name, use, time_limit);
}

// With which devices exchange messages themselves; nullptr: they do not.
const DeviceKernels* kernels_of_peers(const Placement& placement) {
  if (placement.memory == Memory::kHost || !uses_peer_memory()) return nullptr;
  const DeviceKernels* const kernels = kernels_for_devices();
  return kernels != nullptr && kernels->why_not().empty() ? kernels : nullptr;
}

std::unique_ptr<Exchange> exchange_over(const ProcessGroup& group, const Placement& placement,
                                        const std::shared_ptr<OwnGroup>& own,
                                        Milliseconds time_limit) {
  auto over_torch = std::make_unique<C10dCommunicator>(group, placement, time_limit, own);
  over_torch->know_processes(kernels_of_peers(placement));
  // A group of one rank comes here only if NORMSCOPE_FORCE_SYNC is set.
  const auto exchange = [](std::unique_ptr<Communicator> communicator) {
    return std::make_unique<Exchange>(std::move(communicator), WhenAlone::kExchange);
  };
  // On a device a call only queues work: the host does not know when it ends, and shows no calls.
  if (placement.memory != Memory::kHost) {
    over_torch->connect_peers();
    over_torch->watch_peers();
    return exchange(std::move(over_torch));
  }
  const Hosts hosts = find_hosts(*over_torch, time_limit);
  if (!hosts.memory || !hosts.is_one()) {
    // Calls are published in time for the peers' warnings and errors.
    over_torch->show_calls(std::min(time_limit, warning_limit().value_or(time_limit)) / 2);
  }
  return exchange(over_hosts(std::move(over_torch), hosts));
}

// A fork does not destroy the exchange: it lacks its threads, and the connections belong to the
// rank.
std::shared_ptr<Exchange> shared(std::unique_ptr<Exchange> exchange) {
  if (!exchange) return nullptr;
  return {exchange.release(), [home = HomeProcess()](Exchange* made) {
            if (home.is_this_one()) delete made;
          }};
}

}  // namespace

GroupExchanges::GroupExchanges(const ProcessGroup& group, std::string name,
                               const Placement& placement, const HomeProcess& home)
    : group_(group),
      name_(std::move(name)),
      rank_(group->getRank()),
      size_(group->getSize()),
      placement_(placement),
      home_(home) {}

GroupExchanges::GroupExchanges(std::string name, std::unique_ptr<Communicator> communicator)
    : name_(std::move(name)),
      rank_(communicator->rank()),
      size_(communicator->size()),
      of_all_(shared(std::make_unique<Exchange>(std::move(communicator), WhenAlone::kExchange))) {}

std::unique_ptr<Exchange> GroupExchanges::make_exchange(const ProcessGroup& group) {
  rendezvous_.begin();
  const auto end = c10::make_scope_exit([this] { rendezvous_.end(); });
  const Milliseconds time_limit = time_limit_of(*group, placement_);
  watch_calls();
  const std::shared_ptr<OwnGroup> own = own_group_of(*group, name_, placement_, time_limit);
  try {
    if (own) {
      rendezvous_.begin_in(own);
      own->wait_and_make();
    }
    return exchange_over(group, placement_, own, time_limit);
  } catch (const CommunicationError&) {
    throw;  // all ranks throw it
  } catch (const std::exception& error) {
    if (own) own->publish_failure(what_of(error));
    throw;
  }
}

GroupExchanges::Shared GroupExchanges::of_all(const Scope& scope, std::string_view layer) {
  if (of_all_) return of_all_;
  const ProcessGroup group = group_.lock();
  if (!group) throw CommunicationError("the process group was destroyed");
  Shared made;
  try {
    made = shared(make_exchange(group));
  } catch (const CommunicationError& error) {
    throw CommunicationError("the group's rendezvous, by " + text_of_layer(layer) + " (scope " +
                             scope.str() + "): " + error.what());
  }
  const std::lock_guard lock(mutex_);
  return of_all_ = made;
}

GroupExchanges::Shared GroupExchanges::of_leaders(Exchange& all, const std::vector<int>& leaders) {
  const auto found = of_leaders_.find(leaders);
  if (found != of_leaders_.end()) return found->second;
  const Shared made = shared(make_part_of(all, leaders));
  const std::lock_guard lock(mutex_);
  return of_leaders_[leaders] = made;
}

GroupExchanges::Shared GroupExchanges::of_scope(const Scope& scope, std::string_view layer) {
  const std::string text = scope.str();
  const std::lock_guard making(making_);
  const auto found = of_scope_.find(text);
  if (found != of_scope_.end()) return found->second;
  Shared made = of_all(scope, layer);
  if (scope.kind() != Scope::Kind::kWorld) {
    const std::lock_guard use(made->mutex());
    const std::vector<int> leaders = agree_on_leaders(*made, scope, layer);
    const bool is_world = std::ranges::count(leaders, 0) == std::ssize(leaders);
    if (!is_world) made = of_leaders(*made, leaders);
  }
  const std::lock_guard lock(mutex_);
  return of_scope_[text] = made;
}

std::string GroupExchanges::scope_of_norm_batch(const Scope& scope, std::int64_t samples) {
  const std::lock_guard making(making_);
  const std::string text = scope.str();
  const auto found = norm_batches_.find(text);
  if (found != norm_batches_.end()) return found->second;
  const Shared all = of_all(scope, "");
  const std::lock_guard use(all->mutex());
  const std::optional<Scope> resolved = agree_on_norm_batch(*all, scope, "", samples);
  // All batches are empty. Later ones may not be, so nothing is kept.
  if (!resolved) return Scope::world().str();
  const std::lock_guard lock(mutex_);
  return norm_batches_[text] = resolved->str();
}

void GroupExchanges::show_call_alone(const CallName& call) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || !of_all_) return;
  CallBoard* const board = of_all_->communicator().calls();
  if (board != nullptr) board->begin(call, CallState::kAlone);
}

void GroupExchanges::fail(std::string_view scope, std::string_view reason) {
  rendezvous_.fail(reason);
  const std::lock_guard lock(mutex_);
  std::string text(scope);
  if (const auto resolved = norm_batches_.find(text); resolved != norm_batches_.end()) {
    text = resolved->second;
    if (Scope::parse(text).is_of_one_rank()) return;
  }
  const auto found = of_scope_.find(text);
  const Shared& exchange = found != of_scope_.end() ? found->second : of_all_;
  if (exchange) exchange->fail(reason);
}

void GroupExchanges::fail_all(std::string_view reason) {
  rendezvous_.fail(reason);
  const std::lock_guard lock(mutex_);
  if (of_all_) of_all_->fail(reason);
  for (const auto& [leaders, exchange] : of_leaders_) {
    if (exchange) exchange->fail(reason);
  }
}

}  // namespace normscope::binding
