// SPDX-License-Identifier: Apache-2.0
#include "normscope/kernels/cpu/cpu.h"

#include <algorithm>

#include "normscope/kernels/channel_values.h"
#include "normscope/kernels/cpu/channel_arrays.h"
#include "normscope/kernels/cpu/parts.h"
#include "normscope/kernels/cpu/target.h"
#include "normscope/kernels/finalize.h"

namespace normscope::cpu {
namespace {

// As many channels as fill a core's L2 twice. The L2 or an L3 then still holds most of what
// the previous sweep has read. Fewer channels would mean shorter runs, which memory serves more
// slowly (docs/performance.md). If planes are small, chunks are whole vectors of channels, which
// keeps neighbouring chunks from sharing a cache line.
std::int64_t channels_per_chunk(const TensorView& x, int tensors, int threads) {
  if (x.layout() == Layout::kChannelsLast) {
    const std::int64_t parts = useful_threads(threads, x);
    return splits_by_channel(x, parts) ? x.channels / parts : x.channels;
  }
  const std::int64_t bytes_per_channel =
      std::max<std::int64_t>(1, tensors * x.elements_per_channel() * size_of(x.dtype));
  const std::int64_t fitting = 2 * cache_per_core() / bytes_per_channel;
  const std::int64_t fair_share = ceil_divide(x.channels, threads);
  const std::int64_t most = std::clamp<std::int64_t>(fitting, 1, fair_share);
  // The same number of chunks for each thread.
  const std::int64_t chunks = ceil_divide(ceil_divide(x.channels, most), threads) * threads;
  const std::int64_t chunk = ceil_divide(x.channels, chunks);
  return chunk > 8 ? ceil_divide(chunk, 8) * 8 : chunk;
}

template <class View>
View part_of(const View& tensor, TileRange channels) {
  return tensor.channel_range(channels.begin, channels.end);
}

void add_moments(const Target& target, const Execution& execution, const TensorView& x,
                 LimbsView limbs) {
  if (x.empty()) return;
  with_element_type(x.dtype, [&]<class Element>(Element*) {
    sum_parts(execution, x, target, limbs,
              [&](TileRange channels, TileRange tiles, LimbsView into) {
                target.of<Element>().add_moments(part_of(x, channels), tiles, into);
              });
  });
}

void finalize_moments(const Target& target, const Execution& /*execution*/, LimbsView limbs,
                      double n, double eps, DType x_dtype, const MomentsResults& results) {
  const auto& [statistics, running, pooled, count_out] = results;
  if (count_out != nullptr) *count_out = n;
  if (pooled.data != nullptr) target.add_limbs(limbs, pooled);
  if (n > 0.0) {
    running.count();
    target.moments(limbs, n, statistics);
  }
  for (std::int64_t c = 0; c < limbs.channels; ++c) {
    Moments<double> moments{};
    if (n > 0.0) moments = {{statistics.mean_hi[c], statistics.mean_lo[c]}, statistics.inv_std[c]};
    set_statistics(statistics, c, statistics_of(moments, eps, x_dtype == DType::kFloat64));
    update_running(running, c, moments, n);
  }
}

template <class Real>
Formulas<Normalize, Real> normalize_formulas(std::int64_t channels, Statistics statistics,
                                             const AffineActivation& affine) {
  return {channels, [&](std::int64_t c) {
            return normalize_coefficients<Real>(statistics, affine.weight, affine.bias, c);
          }};
}

void normalize(const Target& target, const Execution& execution, const TensorView& x,
               Statistics statistics, const AffineActivation& affine, const TensorView& residual,
               const MutableTensorView& y) {
  if (x.empty()) return;
  with_element_type(x.dtype, [&]<class Element>(Element*) {
    const auto formulas = normalize_formulas<Arithmetic<Element>>(x.channels, statistics, affine);
    const Stores stores = stores_for(y);
    for_parts(execution, x, [&](TileRange channels, TileRange tiles) {
      const auto part = [&](const auto& tensor) { return part_of(tensor, channels); };
      target.of<Element>().normalize(part(x), formulas.from(channels.begin), affine.activation,
                                     part(residual), tiles, stores, part(y));
    });
  });
}

// formulas_from(c): those of the channels from c on.
template <class Element, class FormulasFrom>
void sum_gradients(const Target& target, const Execution& execution, const TensorView& x,
                   const TensorView& dy, const FormulasFrom& formulas_from,
                   const ActivationFunction& activation, LimbsView limbs) {
  sum_parts(execution, x, target, limbs, [&](TileRange channels, TileRange tiles, LimbsView into) {
    target.of<Element>().add_gradient_sums(part_of(x, channels), part_of(dy, channels),
                                           formulas_from(channels.begin), activation, tiles, into);
  });
}

template <class Real>
struct Mean {
  Real mean_hi;
};

void add_gradient_sums(const Target& target, const Execution& execution, const TensorView& x,
                       const TensorView& dy, Statistics statistics, const AffineActivation& affine,
                       LimbsView limbs) {
  if (x.empty()) return;
  with_element_type(x.dtype, [&]<class Element>(Element*) {
    using Real = Arithmetic<Element>;
    if (affine.activation.kind != Activation::kNone) {
      const auto formulas = normalize_formulas<Real>(x.channels, statistics, affine);
      sum_gradients<Element>(
          target, execution, x, dy, [&](std::int64_t c) { return formulas.from(c); },
          affine.activation, limbs);
      return;
    }
    const Formulas<Mean, Real> means(x.channels, [&](std::int64_t c) {
      return Mean<Real>{static_cast<Real>(statistics.mean_hi[c])};
    });
    // Only the means are read.
    const auto formulas_from = [&](std::int64_t c) {
      const Real* const mean_hi = means.from(c).mean_hi();
      return FormulaArrays<Normalize, const Real>{{mean_hi, mean_hi, mean_hi, mean_hi}};
    };
    sum_gradients<Element>(target, execution, x, dy, formulas_from, {}, limbs);
  });
}

void finalize_gradient_sums(const Target& target, const Execution& /*execution*/, LimbsView limbs,
                            Statistics statistics, const GradientResults& results) {
  target.gradient_sums(limbs, statistics, results.sums);
  for (std::int64_t c = 0; c < limbs.channels; ++c) use_gradient_sums(results, c);
}

void input_gradient(const Target& target, const Execution& execution, const TensorView& x,
                    const TensorView& dy, Statistics statistics, const AffineActivation& affine,
                    GradientSums sums, double count, const MutableTensorView& dx) {
  if (x.empty()) return;
  with_element_type(x.dtype, [&]<class Element>(Element*) {
    using Real = Arithmetic<Element>;
    const Formulas<ActivatedInputGradient, Real> formulas(x.channels, [&](std::int64_t c) {
      return ActivatedInputGradient<Real>{
          input_gradient_coefficients<Real>(statistics, affine.weight, sums, count, c),
          static_cast<Real>(channel_value(affine.bias, c, 0.0))};
    });
    const Stores stores = stores_for(dx);
    for_parts(execution, x, [&](TileRange channels, TileRange tiles) {
      const auto part = [&](const auto& tensor) { return part_of(tensor, channels); };
      target.of<Element>().input_gradient(part(x), part(dy), formulas.from(channels.begin),
                                          affine.activation, tiles, stores, part(dx));
    });
  });
}

void activation_gradient(const Target& target, const Execution& execution, const TensorView& x,
                         const TensorView& dy, Statistics statistics,
                         const AffineActivation& affine, const MutableTensorView& dz) {
  if (x.empty()) return;
  with_element_type(x.dtype, [&]<class Element>(Element*) {
    const auto formulas = normalize_formulas<Arithmetic<Element>>(x.channels, statistics, affine);
    for_parts(execution, x, [&](TileRange channels, TileRange tiles) {
      const auto part = [&](const auto& tensor) { return part_of(tensor, channels); };
      target.of<Element>().activation_gradient(part(x), part(dy), formulas.from(channels.begin),
                                               affine.activation, tiles, part(dz));
    });
  });
}

void gradient_of_output(const Target& target, const Execution& execution, const TensorView& y,
                        const TensorView& dy, const ActivationFunction& activation,
                        const MutableTensorView& dz) {
  if (y.empty()) return;
  with_element_type(y.dtype, [&]<class Element>(Element*) {
    for_parts(execution, y, [&](TileRange channels, TileRange tiles) {
      const auto part = [&](const auto& tensor) { return part_of(tensor, channels); };
      target.of<Element>().gradient_of_output(part(y), part(dy), activation, tiles, part(dz));
    });
  });
}

// A function of this file for one instruction set.
template <const Target& kTarget, auto kFunction>
struct Of;
template <const Target& kTarget, class... Arguments,
          void (*kFunction)(const Target& target, Arguments...)>
struct Of<kTarget, kFunction> {
  static void call(Arguments... arguments) { kFunction(kTarget, arguments...); }
};

template <const Target& kTarget>
constexpr Kernels kernels_of(std::string_view name) {
  return {
      .name = name,
      .can_run = [] { return kTarget.can_run(); },
      .channels_per_chunk = channels_per_chunk,
      .add_moments = Of<kTarget, add_moments>::call,
      .finalize_moments = Of<kTarget, finalize_moments>::call,
      .normalize = Of<kTarget, normalize>::call,
      .add_gradient_sums = Of<kTarget, add_gradient_sums>::call,
      .finalize_gradient_sums = Of<kTarget, finalize_gradient_sums>::call,
      .input_gradient = Of<kTarget, input_gradient>::call,
      .activation_gradient = Of<kTarget, activation_gradient>::call,
      .gradient_of_output = Of<kTarget, gradient_of_output>::call,
  };
}

}  // namespace

constinit const Kernels kBaselineKernels = kernels_of<baseline::kTarget>("baseline");
#if defined(__x86_64__)
constinit const Kernels kAvx2Kernels = kernels_of<avx2::kTarget>("avx2");
constinit const Kernels kAvx512Kernels = kernels_of<avx512::kTarget>("avx512");
#endif

}  // namespace normscope::cpu
