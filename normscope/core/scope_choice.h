// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "normscope/core/attributes.h"
#include "normscope/core/scope.h"

namespace normscope NORMSCOPE_EXPORT {

// The default limit for the output noise of all layers, as a share of the variance of the outputs.
// docs/recommending.md explains the choice of this and the following numbers.
inline constexpr double kDefaultOutputNoise = 0.05;

// A norm batch with fewer samples or fewer elements per channel is not recommended. A single sample
// is normalized by its own statistics, which evaluation does not do. A handful of elements per
// channel is mapped to a few values that hardly depend on them: two become -1 and 1.
inline constexpr double kLeastSamples = 2;
inline constexpr double kLeastElements = 8;

// Layers with fewer updates of their running statistics are taken as untrained. Noise at initial
// weights says little about the noise of training: some networks begin with layers of weight 0.
inline constexpr std::int64_t kTrainedUpdates = 50;

// A scope that a layer may get.
struct ScopeCandidate {
  Scope scope = Scope::world();
  std::int64_t ranks = 1;  // that share statistics
};

// The candidates, from the narrowest to the widest: local, node if each of several hosts has the
// same number of consecutive ranks, above 1, and world. Groups within a host are not among them:
// their exchanges send as many bytes as those of the whole host. host_of_rank [ranks] holds any
// number that is the same for all ranks of a host.
[[nodiscard]] std::vector<ScopeCandidate> candidate_scopes(
    std::span<const std::int64_t> host_of_rank);

// What was measured of a layer under a candidate.
struct CandidateNoise {
  std::vector<double> noise;  // [batches], the share of the outputs' variance; 0 for world
  double samples = 0.0;       // of the smallest norm batch
  double elements = 0.0;      // per channel, of the smallest norm batch
};

struct LayerNoise {
  std::string layer;                       // qualified name, for errors
  std::int64_t exchange_bytes = 0;         // of a rank in an exchange
  bool is_trained = true;                  // false: gets world
  std::vector<CandidateNoise> candidates;  // as candidate_scopes() orders them
};

// The sum over layers, over batches.
struct TotalNoise {
  double mean = 0.0;
  double standard_error = 0.0;  // 0 for a single batch

  // The end of the one-sided 95 % interval.
  [[nodiscard]] double upper() const noexcept;
};
[[nodiscard]] TotalNoise total_noise(std::span<const LayerNoise> layers,
                                     std::span<const std::size_t> chosen);

// Chooses a candidate for each layer such that the upper end of the total noise is at most
// `allowed`, at few bytes. All layers begin with the narrowest candidate that is large enough. As
// long as the noise is too high, the layer with the most noise per byte gets world. Then layers
// with world get a narrower candidate again if the noise allows it, those with the least noise per
// byte first.
//
// Throws ArgumentError if a noise is NaN; an infinite one is allowed, and is too much.
[[nodiscard]] std::vector<std::size_t> choose_scopes(std::span<const LayerNoise> layers,
                                                     double allowed);

}  // namespace normscope
