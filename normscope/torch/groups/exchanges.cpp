// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/groups/exchanges.h"

#include <exception>
#include <new>
#include <typeinfo>
#include <vector>

#include <ATen/ops/tensor.h>
#include <c10/util/Type.h>

#include "normscope/core/error.h"
#include "normscope/core/resolution.h"
#include "normscope/torch/errors.h"
#include "normscope/torch/groups/registry.h"

namespace normscope::binding {
namespace {

// False for an invalid scope: the peers may have a valid one, and wait.
bool is_of_one_rank(std::string_view text) {
  try {
    return Scope::parse(text).is_of_one_rank();
  } catch (const ArgumentError&) {
    return false;
  }
}

// Whether Python raised the exception: what the program itself runs within a call, such as hooks.
bool is_of_python(const std::exception& error) {
  return c10::demangle(typeid(error).name()) == "python_error";
}

bool is_recorded() {
  using Mode = c10::impl::TorchDispatchModeKey;
  return is_in_mode(Mode::FAKE) || is_in_mode(Mode::FUNCTIONAL);
}

}  // namespace

Scope parsed_scope(std::string_view text) {
  Scope scope = as_torch([&] { return Scope::parse(text); });
  TORCH_CHECK_VALUE(scope.kind() != Scope::Kind::kNormBatch,
                    "scope: expected a scope resolved by the op resolve_scope, got ", text);
  return scope;
}

void notify_peers(const ScopedCall& call, const ExchangeUse* use) noexcept {
  const auto notify = [&](std::string_view reason) {
    if (use != nullptr) return use->fail(reason);
    try {
      fail_exchanges(reason, call.scope, call.group_name);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
      // There is no group of this name.
    }
  };
  try {
    throw;
  } catch (const MismatchError&) {   // NOLINT(bugprone-empty-catch)
  } catch (const OneValueError&) {   // NOLINT(bugprone-empty-catch)
  } catch (const ScopeError&) {      // NOLINT(bugprone-empty-catch)
  } catch (const c10::DistError&) {  // NOLINT(bugprone-empty-catch)
    // All ranks throw these.
  } catch (const std::bad_alloc&) {
    notify("it is out of memory");
  } catch (const std::exception& error) {
    notify(what_of(error));
  } catch (...) {
    notify("an unknown exception");
  }
}

void notify_peers_of_rest(const ScopedCall& call) noexcept {
  if (is_recorded()) return;
  try {
    throw;
  } catch (const c10::ValueError&) {  // NOLINT(bugprone-empty-catch)
  } catch (const std::exception& error) {
    if (!is_of_python(error)) notify_peers(call, nullptr);
  } catch (...) {
    notify_peers(call, nullptr);
  }
}

ExchangeUse::ExchangeUse(Direction direction, const ScopedCall& call,
                         const std::optional<Placement>& placement)
    : scope_(parsed_scope(call.scope)) {
  if (scope_.is_of_one_rank()) {
    const auto group = used_group_named(call.group_name, placement);
    if (group) group->show_call_alone({.what = name_of(direction), .layer = call.layer});
    return;
  }
  const auto group = group_named(call.group_name, placement);
  if (!group) return;
  exchange_ = group->of_scope(scope_, call.layer);
  if (exchange_) lock_ = std::unique_lock(exchange_->mutex());
}

DeviceReport* ExchangeUse::report() const {
  if (exchange_ == nullptr) return nullptr;
  std::shared_ptr<DeviceReport>& report = exchange_->report();
  if (!report) {
    static_assert(sizeof(DeviceReport) % sizeof(std::int32_t) == 0);
    const at::Tensor memory = zeros_for_report(sizeof(DeviceReport) / sizeof(std::int32_t));
    auto* const made = new (memory.mutable_data_ptr()) DeviceReport;
    report = {made, [memory](DeviceReport*) {}};
  }
  return report.get();
}

void fail_exchanges(std::string_view reason, std::optional<std::string_view> scope,
                    std::string_view group_name) {
  if (scope && (group_name.empty() || is_of_one_rank(*scope))) return;
  bool has_exchange = false;
  for (const auto& group : used_groups()) {
    const bool is_given = group->name() == group_name;
    has_exchange = has_exchange || is_given;
    if (!scope) {
      group->fail_all(reason);
    } else if (is_given) {
      group->fail(*scope, reason);
    }
  }
  if (!group_name.empty() && !has_exchange) fail_rendezvous(std::string(group_name), reason);
}

std::string resolve_scope(std::string_view scope, std::string_view group_name,
                          std::optional<std::int64_t> samples) {
  const Scope parsed = Scope::parse(scope);
  if (parsed.kind() != Scope::Kind::kNormBatch || !samples) return parsed.str();
  const auto group = group_named(group_name);
  if (!group) return resolve_norm_batch(parsed, *samples, 1).str();
  return group->scope_of_norm_batch(parsed, *samples);
}

at::Tensor gather(const at::Tensor& own, std::string_view group_name, std::string_view what) {
  TORCH_CHECK_VALUE(own.dim() == 1 && own.scalar_type() == at::kDouble && own.is_cpu(),
                    "own: expected float64 numbers [n] on the CPU");
  const auto gather_rows = [&](const ExchangeUse& use) {
    if (use.get() == nullptr) return own.unsqueeze(0).clone();
    const at::Tensor numbers = own.contiguous();
    const double* const begin = numbers.const_data_ptr<double>();
    const std::vector<double> rows = use.get()->gather({.layer = what,
                                                        .scope = "world",
                                                        .direction = Direction::kParameters,
                                                        .channels = own.size(0)},
                                                       {begin, begin + own.size(0)});
    return at::tensor(rows, at::kDouble).view({use.get()->communicator().size(), own.size(0)});
  };
  return with_exchange(Direction::kParameters, {"world", group_name, what}, std::nullopt,
                       gather_rows);
}

}  // namespace normscope::binding
