// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/nn/progressive_scope.h"

#include <algorithm>
#include <string>
#include <utility>

#include <c10/util/StringUtil.h>

#include "normscope/core/error.h"
#include "normscope/torch/nn/convert.h"

namespace normscope::nn {
namespace {

void check_milestones(std::size_t scopes, const std::vector<std::int64_t>& milestones) {
  if (scopes == 0 || milestones.size() != scopes) {
    throw ArgumentError("milestones: expected one for each scope, and at least one, got " +
                        std::to_string(milestones.size()) + " for " + std::to_string(scopes));
  }
  const bool increases =
      std::ranges::adjacent_find(milestones, std::greater_equal{}) == milestones.end();
  if (milestones.front() != 0 || !increases) {
    throw ArgumentError("milestones: expected 0 and then increasing steps, got " +
                        c10::Join(", ", milestones));
  }
}

}  // namespace

ProgressiveScope::ProgressiveScope(::torch::nn::Module& module, std::vector<Scope> scopes,
                                   std::vector<std::int64_t> milestones)
    : module_(&module), scopes_(std::move(scopes)), milestones_(std::move(milestones)) {
  check_milestones(scopes_.size(), milestones_);
  set_scope(*module_, scope());
}

ProgressiveScope ProgressiveScope::doubling(::torch::nn::Module& module, std::int64_t total_steps,
                                            int ranks) {
  std::vector<Scope> scopes = {Scope::local()};
  for (std::int64_t size = 2; size < ranks; size *= 2) scopes.push_back(Scope::group(size));
  if (ranks > 1) scopes.push_back(Scope::world());
  const auto stages = static_cast<std::int64_t>(scopes.size());
  if (total_steps < stages) {
    throw ArgumentError("total_steps: expected at least " + std::to_string(stages) +
                        ", one for each scope, got " + std::to_string(total_steps));
  }
  std::vector<std::int64_t> milestones;
  for (std::int64_t i = 0; i < stages; ++i) milestones.push_back(i * total_steps / stages);
  return {module, std::move(scopes), std::move(milestones)};
}

const Scope& ProgressiveScope::scope() const {
  const auto next = std::ranges::upper_bound(milestones_, last_step_);
  return scopes_[static_cast<std::size_t>(next - milestones_.begin()) - 1];
}

void ProgressiveScope::step() {
  const Scope before = scope();
  ++last_step_;
  if (scope() != before) set_scope(*module_, scope());
}

void ProgressiveScope::set_last_step(std::int64_t last_step) {
  if (last_step < 0) {
    throw ArgumentError("last_step: expected at least 0, got " + std::to_string(last_step));
  }
  last_step_ = last_step;
  set_scope(*module_, scope());
}

}  // namespace normscope::nn
