// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "normscope/core/export.h"
#include "normscope/core/scope_choice.h"

namespace normscope {
namespace nn NORMSCOPE_EXPORT {

// What was measured in a layer, and the scope that it gets.
struct LayerPlan {
  std::string layer;  // qualified name
  std::int64_t channels = 0;
  ScopeChoice choice;
  std::int64_t exchange_bytes = 0;         // that a rank sends in an exchange, if it makes any
  std::optional<double> exchange_seconds;  // that one took, waiting included; none: there was none

  [[nodiscard]] const ScopeCandidate& chosen() const { return choice.candidates[choice.chosen]; }
};

// A scope for each layer, and what it was chosen from: recommend_scopes() makes it.
struct ScopePlan {
  std::vector<LayerPlan> layers;    // in the module's order, without those that had no input
  double independent_values = 0.0;  // that were wanted
  std::int64_t ranks = 0;           // that were there, or stood for
  std::int64_t batches = 0;         // that were looked at

  // Of forward and backward; bytes are those that a rank sends.
  [[nodiscard]] std::int64_t exchanges_per_step() const;
  [[nodiscard]] std::int64_t bytes_per_step() const;

  // Gives each layer its scope; others stay as they are. Throws ArgumentError where the module has
  // no layer of normscope of a name of the plan; nothing has been changed then.
  void apply(::torch::nn::Module& module) const;
};

}  // namespace nn
}  // namespace normscope
