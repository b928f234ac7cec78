// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "normscope/core/cache_lines.h"
#include "normscope/kernels/backends.h"
#include "normscope/kernels/cpu/parts.h"
#include "normscope/kernels/cpu/target.h"
#include "normscope/kernels/finalize.h"

namespace normscope::cpu {
namespace {

// Replaces any NaN by the one that arithmetic produces, which rounding to 16 bits relies on.
template <class Real>
Real with_plain_nan(Real value) {
  return value == value ? value : std::numeric_limits<Real>::quiet_NaN();
}

// The coefficients of a formula for every channel of x. formula_of(c) makes those of channel c,
// which consist of doubles; they are rounded to the type of the arithmetic. Each array starts at a
// cache line. A full vector can be read from any channel, even past the last one.
class Coefficients {
 public:
  template <class FormulaOf>
  Coefficients(const Execution& execution, const TensorView& x, const FormulaOf& formula_of) {
    if (x.dtype == DType::kFloat64) {
      fill<double>(execution, x.channels, formula_of);
    } else {
      fill<float>(execution, x.channels, formula_of);
    }
  }

  // The channels from c on.
  [[nodiscard]] ChannelArrays from(std::int64_t c) const {
    return {memory_.data() + c * size_of_number_, stride_};
  }

 private:
  template <class Real, class FormulaOf>
  void fill(const Execution& execution, std::int64_t channels, const FormulaOf& formula_of) {
    constexpr std::size_t kBytes = sizeof(formula_of(std::int64_t{}));
    constexpr std::size_t kCount = kBytes / sizeof(double);
    size_of_number_ = sizeof(Real);
    stride_ = whole_lines<Real>(channels);
    memory_.resize(kCount * static_cast<std::size_t>(stride_) * sizeof(Real) + kCacheLine);
    auto* numbers = reinterpret_cast<Real*>(memory_.data());
    for_channels(execution, channels, [&](TileRange range) {
      for (std::int64_t c = range.begin; c < range.end; ++c) {
        const auto members = std::bit_cast<std::array<double, kCount>>(formula_of(c));
        for (std::size_t k = 0; k < kCount; ++k) {
          numbers[static_cast<std::int64_t>(k) * stride_ + c] =
              with_plain_nan(static_cast<Real>(members[k]));
        }
      }
    });
  }

  std::int64_t size_of_number_ = 0;
  std::int64_t stride_ = 0;  // numbers from one array to the next
  AlignedVector<std::byte> memory_;
};

template <class View>
View part_of(const View& tensor, TileRange channels) {
  return tensor.channel_range(channels.begin, channels.end);
}

template <const Target& kTarget>
void add_moments(const Execution& execution, const TensorView& x, LimbsView limbs) {
  if (x.empty()) return;
  sum_parts(execution, x, kTarget, limbs, [&](TileRange channels, TileRange tiles, LimbsView into) {
    kTarget.add_moments(part_of(x, channels), tiles, into);
  });
}

template <const Target& kTarget>
void finalize_moments(const Execution& execution, LimbsView limbs, double n, double eps,
                      DType x_dtype, const MomentsResults& results) {
  const auto& [statistics, running, pooled, count_out] = results;
  if (count_out != nullptr) *count_out = n;
  if (pooled.data != nullptr) kTarget.add_limbs(limbs, pooled);
  if (n > 0.0) running.count();
  for_channels(execution, limbs.channels, [&](TileRange range) {
    const LimbsView of_range = part_of(limbs, range);
    if (n > 0.0) kTarget.moments(of_range, n, statistics.channel_range(range.begin));
    for (std::int64_t c = range.begin; c < range.end; ++c) {
      Moments<double> moments{};
      if (n > 0.0) {
        moments = {{statistics.mean_hi[c], statistics.mean_lo[c]}, statistics.inv_std[c]};
      }
      set_statistics(statistics, c, statistics_of(moments, eps, x_dtype == DType::kFloat64));
      update_running(running, c, moments, n);
    }
  });
}

Coefficients coefficients_of_y(const Execution& execution, const TensorView& x,
                               Statistics statistics, const AffineActivation& affine) {
  return {execution, x, [&](std::int64_t c) {
            return normalize_coefficients<double>(statistics, affine.weight, affine.bias, c);
          }};
}

template <const Target& kTarget>
void normalize(const Execution& execution, const TensorView& x, Statistics statistics,
               const AffineActivation& affine, const TensorView& residual,
               const MutableTensorView& y) {
  if (x.empty()) return;
  const Coefficients coefficients = coefficients_of_y(execution, x, statistics, affine);
  const Stores stores = stores_for(y);
  for_parts(execution, x, [&](TileRange channels, TileRange tiles) {
    const auto part = [&](const auto& tensor) { return part_of(tensor, channels); };
    kTarget.normalize(part(x), coefficients.from(channels.begin), affine.activation, part(residual),
                      tiles, stores, part(y));
  });
}

// Without an activation, only the means are read.
Coefficients coefficients_of_sums(const Execution& execution, const TensorView& x,
                                  Statistics statistics, const AffineActivation& affine) {
  if (affine.activation.kind != Activation::kNone) {
    return coefficients_of_y(execution, x, statistics, affine);
  }
  return {execution, x, [&](std::int64_t c) { return statistics.mean_hi[c]; }};
}

template <const Target& kTarget>
void add_gradient_sums(const Execution& execution, const TensorView& x, const TensorView& dy,
                       Statistics statistics, const AffineActivation& affine, LimbsView limbs) {
  if (x.empty()) return;
  const Coefficients coefficients = coefficients_of_sums(execution, x, statistics, affine);
  sum_parts(execution, x, kTarget, limbs, [&](TileRange channels, TileRange tiles, LimbsView into) {
    kTarget.add_gradient_sums(part_of(x, channels), part_of(dy, channels),
                              coefficients.from(channels.begin), affine.activation, tiles, into);
  });
}

template <const Target& kTarget>
void finalize_gradient_sums(const Execution& execution, LimbsView limbs, Statistics statistics,
                            const GradientResults& results) {
  for_channels(execution, limbs.channels, [&](TileRange range) {
    kTarget.gradient_sums(part_of(limbs, range), statistics.channel_range(range.begin),
                          results.sums.channel_range(range.begin));
    for (std::int64_t c = range.begin; c < range.end; ++c) use_gradient_sums(results, c);
  });
}

template <const Target& kTarget>
void input_gradient(const Execution& execution, const TensorView& x, const TensorView& dy,
                    Statistics statistics, const AffineActivation& affine, GradientSums sums,
                    double count, const MutableTensorView& dx) {
  if (x.empty()) return;
  const Coefficients coefficients(execution, x, [&](std::int64_t c) {
    return ActivatedInputGradient<double>{
        input_gradient_coefficients<double>(statistics, affine.weight, sums, count, c),
        channel_value(affine.bias, c, 0.0)};
  });
  const Stores stores = stores_for(dx);
  for_parts(execution, x, [&](TileRange channels, TileRange tiles) {
    const auto part = [&](const auto& tensor) { return part_of(tensor, channels); };
    kTarget.input_gradient(part(x), part(dy), coefficients.from(channels.begin), affine.activation,
                           tiles, stores, part(dx));
  });
}

template <const Target& kTarget>
void activation_gradient(const Execution& execution, const TensorView& x, const TensorView& dy,
                         Statistics statistics, const AffineActivation& affine,
                         const MutableTensorView& dz) {
  if (x.empty()) return;
  const Coefficients coefficients = coefficients_of_y(execution, x, statistics, affine);
  for_parts(execution, x, [&](TileRange channels, TileRange tiles) {
    const auto part = [&](const auto& tensor) { return part_of(tensor, channels); };
    kTarget.activation_gradient(part(x), part(dy), coefficients.from(channels.begin),
                                affine.activation, tiles, part(dz));
  });
}

template <const Target& kTarget>
void gradient_of_output(const Execution& execution, const TensorView& y, const TensorView& dy,
                        const ActivationFunction& activation, const MutableTensorView& dz) {
  if (y.empty()) return;
  for_parts(execution, y, [&](TileRange channels, TileRange tiles) {
    const auto part = [&](const auto& tensor) { return part_of(tensor, channels); };
    kTarget.gradient_of_output(part(y), part(dy), activation, tiles, part(dz));
  });
}

template <const Target& kTarget>
constexpr Kernels kernels_of(std::string_view name) {
  return {
      .name = name,
      .can_run = [] { return kTarget.can_run(); },
      .add_moments = add_moments<kTarget>,
      .finalize_moments = finalize_moments<kTarget>,
      .normalize = normalize<kTarget>,
      .add_gradient_sums = add_gradient_sums<kTarget>,
      .finalize_gradient_sums = finalize_gradient_sums<kTarget>,
      .input_gradient = input_gradient<kTarget>,
      .activation_gradient = activation_gradient<kTarget>,
      .gradient_of_output = gradient_of_output<kTarget>,
  };
}

}  // namespace

constinit const Kernels kBaselineKernels = kernels_of<baseline::kTarget>("baseline");
#if defined(__x86_64__)
constinit const Kernels kAvx2Kernels = kernels_of<avx2::kTarget>("avx2");
constinit const Kernels kAvx512Kernels = kernels_of<avx512::kTarget>("avx512");
#endif

}  // namespace normscope::cpu
