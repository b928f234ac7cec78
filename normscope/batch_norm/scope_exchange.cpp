// SPDX-License-Identifier: Apache-2.0
#include "normscope/batch_norm/scope_exchange.h"

#include <algorithm>
#include <string>

#include "normscope/comm/processes.h"
#include "normscope/core/resolution.h"

namespace normscope {
namespace {

std::vector<double> gather_for_scope(Exchange& group, const Scope& scope, std::string_view layer,
                                     std::int64_t own) {
  const std::string text = scope.str();
  return group.gather({.layer = layer, .scope = text, .direction = Direction::kAgreement},
                      {static_cast<double>(own)});
}

}  // namespace

std::vector<int> agree_on_leaders(Exchange& group, const Scope& scope, std::string_view layer) {
  const std::vector<double> gathered = gather_for_scope(group, scope, layer, host_identity());
  return leaders_of(scope, std::vector<std::int64_t>(gathered.begin(), gathered.end()));
}

std::optional<Scope> agree_on_norm_batch(Exchange& group, const Scope& scope,
                                         std::string_view layer, std::int64_t samples) {
  const std::vector<double> gathered = gather_for_scope(group, scope, layer, samples);
  const auto nominal = static_cast<std::int64_t>(std::ranges::max(gathered));
  if (nominal == 0) return std::nullopt;
  return resolve_norm_batch(scope, nominal, group.communicator().size());
}

std::unique_ptr<Exchange> make_part_of(Exchange& group, const std::vector<int>& leaders) {
  const int rank = group.communicator().rank();
  const int leader = leaders[static_cast<std::size_t>(rank)];
  std::unique_ptr<Communicator> part = group.communicator().split(leader, rank);
  if (part->size() == 1) return nullptr;
  std::vector<int> members;
  for (int member = 0; member < group.communicator().size(); ++member) {
    if (leaders[static_cast<std::size_t>(member)] == leader) members.push_back(member);
  }
  return std::make_unique<Exchange>(std::move(part), WhenAlone::kSkip, std::move(members));
}

}  // namespace normscope
