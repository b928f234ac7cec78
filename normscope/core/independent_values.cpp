// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/independent_values.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>

namespace normscope {
namespace {

// Half the width of a 90 % confidence interval, in standard errors.
constexpr double kErrorsOfInterval = 1.645;

constexpr double kNoisiestTenth = 0.9;

// The moments of one part.
struct Part {
  double count;
  std::span<const double> means;      // [C]
  std::span<const double> variances;  // [C]
};

Part part_of(std::span<const double> row) {
  const std::size_t channels = (row.size() - 1) / 2;
  return {row[0], row.subspan(1, channels), row.subspan(1 + channels)};
}

// The nonempty parts of all batches except `left_out`; -1 leaves none out.
std::vector<Part> parts_with_elements(const PartMoments& moments, std::int64_t left_out = -1) {
  std::vector<Part> parts;
  for (std::int64_t batch = 0; batch < moments.batches; ++batch) {
    if (batch == left_out) continue;
    for (std::int64_t k = 0; k < moments.parts; ++k) {
      const Part part = part_of(moments.row(batch, k));
      if (part.count > 0.0) parts.push_back(part);
    }
  }
  return parts;
}

// s^2 / V^2 of each channel whose variance V is at least eps. Expects at least two parts.
std::vector<double> relative_spreads(const std::vector<Part>& parts, std::int64_t channels,
                                     double eps) {
  const auto count = static_cast<double>(parts.size());
  double elements = 0.0;
  for (const Part& part : parts) elements += part.count;
  // Parts are weighted by size; the mean part has weight 1.
  const auto weight = [&](const Part& part) { return part.count * (count / elements); };
  std::vector<double> spreads;
  std::vector<double> errors(parts.size());
  for (std::size_t c = 0; c < static_cast<std::size_t>(channels); ++c) {
    double mean = 0.0;
    for (const Part& part : parts) mean += weight(part) * part.means[c];
    mean /= count;
    double variance = 0.0;
    for (std::size_t k = 0; k < parts.size(); ++k) {
      const double distance = parts[k].means[c] - mean;
      errors[k] = parts[k].variances[c] + distance * distance;
      variance += weight(parts[k]) * errors[k];
    }
    variance /= count;
    if (variance < eps) continue;
    double spread = 0.0;
    for (std::size_t k = 0; k < parts.size(); ++k) {
      spread += weight(parts[k]) * (errors[k] - variance) * (errors[k] - variance);
    }
    const double damped = variance + eps;
    spreads.push_back(spread / (count - 1.0) / (damped * damped));
  }
  return spreads;
}

// A of docs/numerics.md from s^2 / V^2; V^2 itself is too large by s^2 / P.
double noise_of(double spread, std::size_t parts) {
  // The share is 1 if a single part has all of the variance.
  constexpr double kLeast = 1e-3;
  const double share = spread / static_cast<double>(parts);
  return spread / std::max(1.0 - share, kLeast);
}

double mean_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// Interpolates between the two nearest values. 0 for no values; NaN if any value is NaN.
double quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0.0;
  if (std::ranges::any_of(values, [](double value) { return std::isnan(value); })) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  std::ranges::sort(values);
  const double place = share * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  const std::size_t above = std::min(below + 1, values.size() - 1);
  return std::lerp(values[below], values[above], place - static_cast<double>(below));
}

// The squared relative error of a part's variance, averaged over the channels: 2 / value. 0 if no
// channel is left.
double mean_noise(const std::vector<double>& spreads, std::size_t parts) {
  return spreads.empty() ? 0.0 : noise_of(mean_of(spreads), parts);
}

// How many independent normal values have a variance with this squared relative error.
double worth(double noise) {
  return noise <= 0.0 ? std::numeric_limits<double>::infinity() : 2.0 / noise;
}

// The standard error of the noise, from leaving out one batch at a time. NaN if fewer than two
// parts remain without some batch.
double jackknife_error(const PartMoments& moments, double eps) {
  std::vector<double> noises;
  for (std::int64_t batch = 0; batch < moments.batches; ++batch) {
    const std::vector<Part> parts = parts_with_elements(moments, batch);
    if (parts.size() < 2) return std::numeric_limits<double>::quiet_NaN();
    noises.push_back(mean_noise(relative_spreads(parts, moments.channels, eps), parts.size()));
  }
  const double mean = mean_of(noises);
  double squares = 0.0;
  for (const double noise : noises) squares += (noise - mean) * (noise - mean);
  const auto batches = static_cast<double>(moments.batches);
  return std::sqrt((batches - 1.0) / batches * squares);
}

// Appends the row of several parts taken together (Chan et al. 1979).
void append_joined(const std::vector<Part>& parts, std::vector<double>& rows) {
  double elements = 0.0;
  for (const Part& part : parts) elements += part.count;
  const double divisor = std::max(elements, 1.0);
  std::vector<double> means(parts[0].means.size());
  std::vector<double> variances(means.size());
  for (std::size_t c = 0; c < means.size(); ++c) {
    for (const Part& part : parts) means[c] += part.count * part.means[c] / divisor;
    for (const Part& part : parts) {
      const double distance = part.means[c] - means[c];
      variances[c] += part.count * (part.variances[c] + distance * distance) / divisor;
    }
  }
  rows.push_back(elements);
  rows.insert(rows.end(), means.begin(), means.end());
  rows.insert(rows.end(), variances.begin(), variances.end());
}

}  // namespace

PartMoments joined(const PartMoments& moments, std::int64_t count) {
  PartMoments result{.batches = moments.batches,
                     .parts = moments.parts / count,
                     .channels = moments.channels,
                     .rows = {}};
  for (std::int64_t batch = 0; batch < moments.batches; ++batch) {
    for (std::int64_t begin = 0; begin < moments.parts; begin += count) {
      std::vector<Part> parts;
      for (std::int64_t k = begin; k < begin + count; ++k) {
        parts.push_back(part_of(moments.row(batch, k)));
      }
      append_joined(parts, result.rows);
    }
  }
  return result;
}

IndependentValues times(const IndependentValues& values, double factor) noexcept {
  return {.value = factor * values.value,
          .lower = factor * values.lower,
          .upper = factor * values.upper,
          .noisiest_tenth = factor * values.noisiest_tenth};
}

std::optional<IndependentValues> independent_values(const PartMoments& moments, double eps) {
  const std::vector<Part> parts = parts_with_elements(moments);
  if (parts.size() < 2) return std::nullopt;
  const std::vector<double> spreads = relative_spreads(parts, moments.channels, eps);
  const double noise = mean_noise(spreads, parts.size());
  const double reach = kErrorsOfInterval * jackknife_error(moments, eps);
  return IndependentValues{
      .value = worth(noise),
      .lower = worth(noise + reach),
      .upper = worth(noise - reach),
      .noisiest_tenth = worth(noise_of(quantile(spreads, kNoisiestTenth), parts.size()))};
}

}  // namespace normscope
