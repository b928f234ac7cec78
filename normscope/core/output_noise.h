// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// How much narrower statistics of a layer change the outputs of a network: docs/numerics.md,
// "Output noise".

// Moments of one part of a batch at a layer's input; a part is the share of one rank.
struct PartMoments {
  double samples = 0.0;               // N of the part
  double count = 0.0;                 // elements per channel
  std::span<const double> means;      // [C]
  std::span<const double> variances;  // [C], with divisor `count`

  // Reads a row [2 + 2 C], or the beginning of a longer one.
  [[nodiscard]] static PartMoments of(std::span<const double> row, std::int64_t channels);
};

// The variance of all parts together, averaged over the channels.
[[nodiscard]] double mean_variance(std::span<const PartMoments> parts);

// Sums over one part of dz, the gradient of a projection of the network's outputs with respect to
// the output of the normalization.
struct PartGradients {
  std::span<const double> gradients;  // [C], sum of dz
  std::span<const double> products;   // [C], sum of dz * (x - mean of the part)
};

// What a layer's norm batches of a certain number of ranks add, for one batch.
struct SizeNoise {
  // The sum over the own parts of the squared change of the projection, to first order, if a part
  // is normalized with the statistics of its norm batch instead of those of all ranks.
  double noise = 0.0;
  double samples = 0.0;   // of the smallest norm batch that has elements; 0 if none has
  double elements = 0.0;  // per channel, of that norm batch
};

// Compares norm batches of sizes[i] consecutive ranks with that of all ranks. `moments` are those
// of all ranks; own[k] belongs to rank first + k. Each size divides the number of ranks. An empty
// `weight` stands for ones.
[[nodiscard]] std::vector<SizeNoise> noise_of_sizes(std::span<const PartMoments> moments,
                                                    std::span<const PartGradients> own,
                                                    std::size_t first,
                                                    std::span<const std::int64_t> sizes,
                                                    std::span<const double> weight, double eps);

}  // namespace normscope
