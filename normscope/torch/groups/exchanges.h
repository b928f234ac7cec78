// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "normscope/batch_norm/exchange.h"
#include "normscope/core/attributes.h"
#include "normscope/core/scope.h"
#include "normscope/torch/groups/group_exchanges.h"
#include "normscope/torch/tensors/device.h"
#include "normscope/torch/tensors/op.h"

namespace normscope::binding {

// Parses a scope that a call can run with. Throws for norm_batch:M, which must be resolved first.
[[nodiscard]] Scope parsed_scope(std::string_view text);

// The exchange of a layer's call: among the ranks of a group that share statistics under the call's
// scope. One thread at a time uses an exchange, for the lifetime of this object.
//
// An exchange is made at its first use, which is collective over the group, and kept until the
// group is destroyed. Scopes that divide the ranks in the same way share one. Messages of CPU
// tensors go through shared memory within a host and through a process group between hosts;
// messages of other tensors go through the backend for their device. The first use reads the
// environment variables of docs/environment.md.
class ExchangeUse {
 public:
  // call.group_name names a process group, or a registered communicator. `placement`: where the
  // messages are; none: in host memory.
  ExchangeUse(Direction direction, const ScopedCall& call,
              const std::optional<Placement>& placement = std::nullopt);

  [[nodiscard]] const Scope& scope() const noexcept { return scope_; }

  // nullptr if this rank is alone.
  [[nodiscard]] Exchange* get() const noexcept { return exchange_.get(); }

  // Where a device reports errors of this exchange; nullptr if there is no exchange.
  [[nodiscard]] DeviceReport* report() const;

  // Notifies the peers, if there are any, that this rank will not come.
  void fail(std::string_view reason) const noexcept {
    if (exchange_ != nullptr) exchange_->fail(reason);
  }

 private:
  Scope scope_;
  std::shared_ptr<Exchange> exchange_;
  std::unique_lock<std::mutex> lock_;
};

// For handlers of exceptions: notifies the peers of a call that this rank will not come, because of
// the exception at hand, unless all ranks throw it. `use`: the exchange; nullptr if there is none
// yet.
NORMSCOPE_EXPORT void notify_peers(const ScopedCall& call, const ExchangeUse* use) noexcept;

// Returns body(use), with the exchange of a call. Every op that exchanges does it here: whatever
// leaves it as an exception, the peers are notified.
template <class Body>
auto with_exchange(Direction direction, const ScopedCall& call,
                   const std::optional<Placement>& placement, const Body& body) {
  std::optional<ExchangeUse> use;
  try {
    use.emplace(direction, call, placement);
    return body(*use);
  } catch (...) {
    notify_peers(call, use ? &*use : nullptr);
    throw;
  }
}

// The same for what a call does before and after its op, while it runs and not while it is recorded
// for a graph. The op has notified the peers of its own ValueErrors, or all ranks throw them.
void notify_peers_of_rest(const ScopedCall& call) noexcept;

template <class Body>
auto or_notify_peers(const ScopedCall& call, const Body& body) {
  try {
    return body();
  } catch (...) {
    notify_peers_of_rest(call);
    throw;
  }
}

// fail() for a rank that fails before it has its exchange. Not collective. Peers throw when they
// wait in the exchange of the scope, or in the group's rendezvous, now or later. Without a scope,
// the same for every exchange that this rank has taken part in, whatever its group, and for the
// rendezvous of the given group if it has no exchange yet.
void fail_exchanges(std::string_view reason, std::optional<std::string_view> scope,
                    std::string_view group_name);

// The scope to run with, in the form in which scopes are compared. norm_batch:M is resolved for the
// largest batch of any rank when the group first used this scope; that use is collective. A rank
// alone resolves it for `samples`. Without `samples` nothing is resolved, and it is not collective.
[[nodiscard]] std::string resolve_scope(std::string_view scope, std::string_view group_name,
                                        std::optional<std::int64_t> samples);

// The vectors of all ranks of a group, in rank order: own [n], float64, on the host; result [ranks,
// n]. Collective. Errors call it `what`.
[[nodiscard]] NORMSCOPE_EXPORT at::Tensor gather(const at::Tensor& own, std::string_view group_name,
                                                 std::string_view what);

}  // namespace normscope::binding
