// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/nn/scope_plan.h"

#include <algorithm>
#include <string>
#include <utility>

#include "normscope/core/error.h"
#include "normscope/torch/nn/layers.h"

namespace normscope::nn {

std::int64_t ScopePlan::exchanges_per_step() const {
  std::int64_t exchanges = 0;
  for (const LayerPlan& plan : layers) exchanges += chosen(plan).ranks > 1 ? 2 : 0;
  return exchanges;
}

std::int64_t ScopePlan::bytes_per_step() const {
  std::int64_t bytes = 0;
  for (const LayerPlan& plan : layers) {
    bytes += chosen(plan).ranks > 1 ? 2 * plan.exchange_bytes : 0;
  }
  return bytes;
}

void ScopePlan::apply(::torch::nn::Module& module) const {
  const std::vector<NamedLayer> named = named_layers(module);
  std::vector<std::pair<BatchNormOptions*, const Scope*>> changes;
  std::string missing;
  for (const LayerPlan& plan : layers) {
    const auto found = std::ranges::find(named, plan.layer, &NamedLayer::name);
    if (found == named.end()) {
      missing += (missing.empty() ? "" : ", ") + plan.layer;
    } else {
      const std::int64_t channels = found->options->num_features();
      if (channels != plan.channels) {
        throw ArgumentError("module: expected " + std::to_string(plan.channels) + " channels in " +
                            plan.layer + ", for which the plan was made, got " +
                            std::to_string(channels));
      }
      changes.emplace_back(found->options, &chosen(plan).scope);
    }
  }
  if (!missing.empty()) {
    throw ArgumentError("module: expected layers of normscope called " + missing + ", got none");
  }
  for (const auto& [options, scope] : changes) options->scope(*scope);
}

}  // namespace normscope::nn
