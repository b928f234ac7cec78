// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "normscope/batch_norm/exchange.h"
#include "normscope/comm/calls.h"
#include "normscope/comm/home_process.h"
#include "normscope/core/scope.h"
#include "normscope/kernels/device_kernels.h"
#include "normscope/torch/device.h"

namespace normscope::binding {

using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

// What the names of process groups begin with that a program has given to a RankGroup, and uses for
// nothing else.
inline constexpr std::string_view kRankGroup = "normscope::RankGroup ";

// An exchange, which scopes that divide the ranks alike share.
struct ExchangeEntry {
  explicit ExchangeEntry(std::unique_ptr<Exchange> made);
  // The threads of a communicator are not in a fork, and its connections are those of the rank.
  ~ExchangeEntry();
  ExchangeEntry(const ExchangeEntry&) = delete;
  ExchangeEntry& operator=(const ExchangeEntry&) = delete;

  HomeProcess home;
  std::mutex mutex;                    // held while the exchange is used
  std::unique_ptr<Exchange> exchange;  // nullptr: this rank shares with none
  at::Tensor report_memory;            // made at first use on a device
  DeviceReport* report = nullptr;
};

// The exchanges of one group of ranks, for tensors of one placement. Threads may call it at once.
class GroupExchanges {
 public:
  // `home`: the process that is this rank of the group.
  GroupExchanges(const ProcessGroup& group, std::string name, const Placement& placement,
                 const HomeProcess& home);
  GroupExchanges(std::string name, std::unique_ptr<Communicator> communicator);

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }
  [[nodiscard]] const HomeProcess& home() const noexcept { return home_; }

  // A later group may have the name of one that was destroyed: the name is not enough to know it
  // by.
  [[nodiscard]] bool is_of(const ProcessGroup& group) const { return group_.lock() == group; }
  [[nodiscard]] bool is_destroyed() const { return group_.expired(); }

  // The exchange of the ranks that a scope lets share statistics. Collective over the group at the
  // scope's first use. Throws CommunicationError, and what the agreement on the scope throws.
  [[nodiscard]] std::shared_ptr<ExchangeEntry> of_scope(const Scope& scope, std::string_view layer);

  // The scope that a wanted norm batch size stands for where a rank has `samples` samples.
  // Collective at its first use, as above.
  [[nodiscard]] std::string scope_of_norm_batch(const Scope& scope, std::int64_t samples);

  // Shows peers that wait for this rank a call that sends nothing, if the group has met.
  void show_call_alone(const CallName& call);

  // Ends what the exchange of the scope waits for, on all its ranks; before the scope's first use
  // that of the group. Not collective.
  void fail(std::string_view scope, std::string_view reason);
  void fail_all(std::string_view reason);

  // Ends the first meeting of a process group that this rank will not come to.
  static void fail_first_meeting(c10d::ProcessGroup& group, const std::string& name,
                                 std::string_view reason);

 private:
  using Entry = std::shared_ptr<ExchangeEntry>;

  [[nodiscard]] std::unique_ptr<Exchange> make_exchange(const ProcessGroup& group) const;
  [[nodiscard]] Entry of_all(const Scope& scope, std::string_view layer);
  [[nodiscard]] Entry of_leaders(Exchange& all, const std::vector<int>& leaders);

  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_{ProcessGroup()};  // none: a communicator's
  std::string name_;
  int rank_;
  int size_;
  Placement placement_;  // of the tensors that are normalized
  HomeProcess home_;

  std::mutex mutex_;  // of what follows, held while an exchange is made
  Entry of_all_;
  std::map<std::string, Entry> of_scope_;
  std::map<std::vector<int>, Entry> of_leaders_;
  std::map<std::string, std::string> norm_batches_;  // and what they stand for
};

}  // namespace normscope::binding
