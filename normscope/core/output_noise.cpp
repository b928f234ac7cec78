// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/output_noise.h"

#include <cmath>
#include <numeric>

namespace normscope {
namespace {

// Moments of several parts taken together.
struct PooledMoments {
  double samples = 0.0;
  double count = 0.0;
  std::vector<double> means;
  std::vector<double> variances;
};

// Pools parts (Chan et al. 1979); those without elements add nothing.
PooledMoments pooled(std::span<const PartMoments> parts) {
  const std::size_t channels = parts[0].means.size();
  PooledMoments result{.means = std::vector<double>(channels),
                       .variances = std::vector<double>(channels)};
  for (const PartMoments& part : parts) {
    if (part.count == 0.0) continue;
    result.samples += part.samples;
    result.count += part.count;
    const double share = part.count / result.count;
    for (std::size_t c = 0; c < channels; ++c) {
      const double distance = part.means[c] - result.means[c];
      result.means[c] += share * distance;
      result.variances[c] +=
          share * (part.variances[c] - result.variances[c] + (1.0 - share) * distance * distance);
    }
  }
  return result;
}

// By how much the projection changes if the part is normalized with `narrow` instead of `wide`
// moments.
double projected_change(const PartMoments& part, const PartGradients& sums,
                        const PooledMoments& narrow, const PooledMoments& wide,
                        std::span<const double> weight, double eps) {
  double change = 0.0;
  for (std::size_t c = 0; c < part.means.size(); ++c) {
    const double narrow_inv_std = 1.0 / std::sqrt(narrow.variances[c] + eps);
    const double wide_inv_std = 1.0 / std::sqrt(wide.variances[c] + eps);
    // The difference between the two xhat, at the part's mean and per unit of x.
    const double at_mean = (part.means[c] - narrow.means[c]) * narrow_inv_std -
                           (part.means[c] - wide.means[c]) * wide_inv_std;
    const double slope = narrow_inv_std - wide_inv_std;
    const double of_channel = at_mean * sums.gradients[c] + slope * sums.products[c];
    change += weight.empty() ? of_channel : weight[c] * of_channel;
  }
  return change;
}

}  // namespace

PartMoments PartMoments::of(std::span<const double> row, std::int64_t channels) {
  const auto size = static_cast<std::size_t>(channels);
  return {.samples = row[0],
          .count = row[1],
          .means = row.subspan(2, size),
          .variances = row.subspan(2 + size, size)};
}

double mean_variance(std::span<const PartMoments> parts) {
  const PooledMoments all = pooled(parts);
  return std::accumulate(all.variances.begin(), all.variances.end(), 0.0) /
         static_cast<double>(all.variances.size());
}

std::vector<SizeNoise> noise_of_sizes(std::span<const PartMoments> moments,
                                      std::span<const PartGradients> own, std::size_t first,
                                      std::span<const std::int64_t> sizes,
                                      std::span<const double> weight, double eps) {
  const PooledMoments wide = pooled(moments);
  std::vector<SizeNoise> result;
  for (const std::int64_t ranks : sizes) {
    const auto size = static_cast<std::size_t>(ranks);
    SizeNoise of_size;
    for (std::size_t begin = 0; begin < moments.size(); begin += size) {
      const PooledMoments narrow = pooled(moments.subspan(begin, size));
      if (narrow.count == 0.0) continue;
      if (of_size.elements == 0.0 || narrow.count < of_size.elements) {
        of_size.samples = narrow.samples;
        of_size.elements = narrow.count;
      }
      for (std::size_t rank = begin; rank < begin + size; ++rank) {
        if (rank < first || rank >= first + own.size() || moments[rank].count == 0.0) continue;
        const double change =
            projected_change(moments[rank], own[rank - first], narrow, wide, weight, eps);
        of_size.noise += change * change;
      }
    }
    result.push_back(of_size);
  }
  return result;
}

}  // namespace normscope
