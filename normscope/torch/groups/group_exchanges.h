// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "normscope/batch_norm/exchange.h"
#include "normscope/comm/calls.h"
#include "normscope/comm/processes.h"
#include "normscope/core/scope.h"
#include "normscope/torch/groups/rendezvous.h"
#include "normscope/torch/tensors/device.h"

namespace normscope::binding {

using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

// The beginning of the name of a RankGroup's process group, which carries only normscope's
// messages.
inline constexpr std::string_view kRankGroup = "normscope::RankGroup ";

// The exchanges of one group of ranks, for tensors of one placement. Several threads may use it at
// the same time.
class GroupExchanges {
 public:
  // `home`: this rank's process, and not a fork of it.
  GroupExchanges(const ProcessGroup& group, std::string name, const Placement& placement,
                 const HomeProcess& home);
  GroupExchanges(std::string name, std::unique_ptr<Communicator> communicator);

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }
  [[nodiscard]] const HomeProcess& home() const noexcept { return home_; }

  // A later group may have the name of a destroyed one, so names do not identify groups.
  [[nodiscard]] bool is_of(const ProcessGroup& group) const { return group_.lock() == group; }
  [[nodiscard]] bool is_destroyed() const { return group_.expired(); }

  // The exchange among the ranks that share statistics with this one; nullptr if this rank is
  // alone. Scopes that divide the ranks in the same way share one. Collective over the group at the
  // scope's first use. Throws CommunicationError, and the errors of agree_on_leaders().
  [[nodiscard]] std::shared_ptr<Exchange> of_scope(const Scope& scope, std::string_view layer);

  // Resolves norm_batch:M; `samples` is the size of this rank's batch. Collective at the scope's
  // first use, as above.
  [[nodiscard]] std::string scope_of_norm_batch(const Scope& scope, std::int64_t samples);

  // Shows a call without messages to peers that wait for this rank. Does nothing before the group's
  // rendezvous.
  void show_call_alone(const CallName& call);

  // Ends the waits of all ranks in the exchange of the scope, which may be norm_batch:M, or, before
  // its first use, in the exchange of the whole group, or in the group's rendezvous. Neither
  // collective nor waiting for threads that use an exchange.
  void fail(std::string_view scope, std::string_view reason);
  void fail_all(std::string_view reason);

 private:
  using Shared = std::shared_ptr<Exchange>;

  [[nodiscard]] std::unique_ptr<Exchange> make_exchange(const ProcessGroup& group);
  [[nodiscard]] Shared of_all(const Scope& scope, std::string_view layer);
  [[nodiscard]] Shared of_leaders(Exchange& all, const std::vector<int>& leaders);

  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_{ProcessGroup()};  // none: a communicator
  std::string name_;
  int rank_;
  int size_;
  Placement placement_;  // of the tensors that are normalized
  HomeProcess home_;

  Rendezvous rendezvous_;
  std::mutex making_;  // held while the ranks make an exchange or agree on a scope
  std::mutex mutex_;   // guards the members below
  Shared of_all_;
  std::map<std::string, Shared> of_scope_;
  std::map<std::vector<int>, Shared> of_leaders_;
  std::map<std::string, std::string> norm_batches_;  // resolved scopes
};

}  // namespace normscope::binding
