// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "normscope/batch_norm/exchange.h"
#include "normscope/core/scope.h"
#include "normscope/torch/device.h"
#include "normscope/torch/group_exchanges.h"
#include "normscope/torch/operators.h"

namespace normscope::binding {

// The exchange of the ranks of a group that a scope lets share statistics, for one thread
// at a time and as long as this object lives.
//
// It is made at first use, which is collective over the group, and kept until the group is
// destroyed: between tensors of one host shared memory, else the group's own backend for the device
// that they are on. Scopes that divide the ranks alike have one exchange. Environment variables,
// read at first use: NORMSCOPE_SHARED_MEMORY=0 keeps to the group's backend (one rank that sets it
// decides for all), NORMSCOPE_TIMEOUT=seconds replaces the group's time limit, and
// NORMSCOPE_FORCE_SYNC=1 makes a group of one rank exchange as others do.
class ExchangeUse {
 public:
  // The group of the call is a process group's name, or a registered communicator's. `placement` is
  // that of the messages; none: the host's memory.
  ExchangeUse(Direction direction, const ScopedCall& call,
              const std::optional<Placement>& placement = std::nullopt);

  [[nodiscard]] const Scope& scope() const noexcept { return scope_; }

  // nullptr where this rank is alone.
  [[nodiscard]] Exchange* get() const noexcept { return exchange_; }

  // Where a device puts down what it finds out about this exchange; nullptr where there is none.
  [[nodiscard]] DeviceReport* report() const;

  // Tells the peers, if there are any, that this rank will not come.
  void fail(std::string_view reason) const noexcept {
    if (exchange_ != nullptr) exchange_->fail(reason);
  }

 private:
  Scope scope_;
  std::shared_ptr<ExchangeEntry> entry_;
  std::unique_lock<std::mutex> lock_;
  Exchange* exchange_ = nullptr;
};

// The same for a rank that has raised before it knew its exchange: not collective. Peers that have
// come, or come, to the exchange of the scope throw, or to the first meeting of the group.
void fail_exchange(std::string_view scope, std::string_view group_name, std::string_view reason);

// The same for every exchange that this rank has taken part in.
void fail_all_exchanges(std::string_view reason);

// The scope to run with: norm_batch:M becomes the one that it stands for where each rank has
// `samples` samples, or the most that any rank of the group had when the scope was first used there
// (which is collective). Other scopes stay as they are.
[[nodiscard]] std::string resolve_scope(std::string_view scope, std::string_view group_name,
                                        std::int64_t samples);

// The vectors of all ranks of a group, in the order of the ranks: own [n], float64, on the host;
// result [ranks, n]. Collective. `what` is named in errors.
[[nodiscard]] at::Tensor gather(const at::Tensor& own, std::string_view group_name,
                                std::string_view what);

// How many samples each rank of the group has in the step to come, in the order of the ranks; `own`
// alone where this rank is alone. Negative numbers travel as they are. Collective.
[[nodiscard]] std::vector<std::int64_t> gather_samples_of_group(std::string_view group_name,
                                                                std::int64_t own);

// What carries the messages of the process group: "shared memory", "gloo", ...; "none" where its
// one rank sends none. Collective at first use.
[[nodiscard]] std::string transport_of(std::string_view group_name);

}  // namespace normscope::binding
