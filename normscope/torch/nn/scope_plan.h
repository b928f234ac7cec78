// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "normscope/core/attributes.h"
#include "normscope/core/scope_choice.h"

namespace normscope {
namespace nn NORMSCOPE_EXPORT {

// The measurements of a layer, and the scope chosen for it.
struct LayerPlan {
  std::string layer;  // qualified name
  std::int64_t channels = 0;
  std::vector<double> noise;            // [candidates], the mean over the batches
  std::size_t chosen = 0;               // index into ScopePlan::candidates
  std::optional<std::int64_t> updates;  // of the running statistics so far; nullopt: there are none
  std::int64_t exchange_bytes = 0;      // that a rank sends in an exchange, if it makes any
  std::optional<double>
      exchange_seconds;  // per exchange, waiting included; nullopt: there was none
};

// A scope for each layer, with the measurements. Made by recommend_scopes().
struct ScopePlan {
  std::vector<ScopeCandidate> candidates;  // from the narrowest to the widest
  std::vector<LayerPlan> layers;           // in the module's order, without layers without input
  double allowed = 0.0;                    // noise, as a share of the variance of the outputs
  TotalNoise noise;                        // of this plan, over all layers
  std::int64_t ranks = 0;                  // measured, or stood for by parts
  std::int64_t batches = 0;                // measured

  [[nodiscard]] const ScopeCandidate& chosen(const LayerPlan& layer) const {
    return candidates[layer.chosen];
  }

  // Over forward and backward. Bytes are those that one rank sends.
  [[nodiscard]] std::int64_t exchanges_per_step() const;
  [[nodiscard]] std::int64_t bytes_per_step() const;

  // Gives each layer its scope; layers that are not in the plan keep theirs. Throws ArgumentError
  // if the module lacks a layer of the plan, or it has another number of channels. Nothing is
  // changed then.
  void apply(::torch::nn::Module& module) const;
};

}  // namespace nn
}  // namespace normscope
