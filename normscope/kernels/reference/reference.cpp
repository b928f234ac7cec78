// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <utility>

#include "normscope/core/activation_functions.h"
#include "normscope/core/cache_lines.h"
#include "normscope/core/element.h"
#include "normscope/core/formulas.h"
#include "normscope/kernels/backends.h"
#include "normscope/kernels/finalize.h"

namespace normscope::reference {
namespace {

// The element at [n, c, p], as float64.
double read(const TensorView& x, std::int64_t n, std::int64_t c, std::int64_t p) {
  const std::int64_t at = n * x.sample_stride + c * x.channel_stride + p * x.position_stride;
  return with_element_type(x.dtype, [&]<class Element>(Element*) {
    return static_cast<double>(widen(static_cast<const Element*>(x.data)[at]));
  });
}

void write(const MutableTensorView& y, std::int64_t n, std::int64_t c, std::int64_t p,
           double value) {
  const std::int64_t at = n * y.sample_stride + c * y.channel_stride + p * y.position_stride;
  with_element_type(y.dtype, [&]<class Element>(Element*) {
    static_cast<Element*>(y.data)[at] = round_once<Element>(value);
  });
}

void add_part(LimbsView limbs, int sum, std::int64_t c, double part) {
  for (int k = 0; k < kLimbs; ++k) {
    const double on_grid = round_to_grid(part, grid(k));
    limbs.limb(sum, k)[c] += on_grid;
    part -= on_grid;
  }
}

void add_tile(LimbsView limbs, int sum, std::int64_t c, DoubleDouble<double> tile) {
  add_part(limbs, sum, c, tile.hi);
  add_part(limbs, sum, c, tile.lo);
}

void canonicalize_channel(LimbsView limbs, int sum, std::int64_t c) {
  double values[kLimbs];
  for (int k = 0; k < kLimbs; ++k) values[k] = limbs.limb(sum, k)[c];
  canonicalize(values);
  for (int k = 0; k < kLimbs; ++k) limbs.limb(sum, k)[c] = values[k];
}

void add_limbs(LimbsView from, LimbsView to) {
  for (int sum = 0; sum < kSums; ++sum) {
    for (std::int64_t c = 0; c < to.channels; ++c) {
      for (int k = 0; k < kLimbs; ++k) to.limb(sum, k)[c] += from.limb(sum, k)[c];
      canonicalize_channel(to, sum, c);
    }
  }
}

bool can_run() { return true; }

// Adds the sums of a and of a * b, where factors(n, c, p) = {a, b}.
template <class Factors>
void add_sums(const TensorView& x, LimbsView limbs, const Factors& factors) {
  for (std::int64_t c = 0; c < x.channels; ++c) {
    for (std::int64_t n = 0; n < x.samples; ++n) {
      DoubleDouble<double> sum{0.0, 0.0};
      DoubleDouble<double> sum_of_products{0.0, 0.0};
      for (std::int64_t p = 0; p < x.positions; ++p) {
        const auto [a, b] = factors(n, c, p);
        sum = add(sum, a);
        sum_of_products = add(sum_of_products, two_product(a, b));
      }
      add_tile(limbs, kSumOfValues, c, sum);
      add_tile(limbs, kSumOfProducts, c, sum_of_products);
    }
    canonicalize_channel(limbs, kSumOfValues, c);
    canonicalize_channel(limbs, kSumOfProducts, c);
  }
}

void add_moments(const Execution& /*execution*/, const TensorView& x, LimbsView limbs) {
  add_sums(x, limbs, [&](std::int64_t n, std::int64_t c, std::int64_t p) {
    const double value = read(x, n, c, p);
    return std::pair(value, value);
  });
}

void finalize_moments(const Execution& /*execution*/, LimbsView limbs, double n, double eps,
                      DType x_dtype, const MomentsResults& results) {
  const auto& [statistics, running, pooled, count_out] = results;
  if (count_out != nullptr) *count_out = n;
  if (pooled.data != nullptr) add_limbs(limbs, pooled);
  if (n > 0.0) running.count();
  for (std::int64_t c = 0; c < limbs.channels; ++c) {
    const Moments<double> batch =
        n > 0.0 ? moments(total_of(limbs, kSumOfValues, c), total_of(limbs, kSumOfProducts, c), n)
                : Moments<double>{};
    set_statistics(statistics, c, statistics_of(batch, eps, x_dtype == DType::kFloat64));
    update_running(running, c, batch, n);
  }
}

void finalize_gradient_sums(const Execution& /*execution*/, LimbsView limbs, Statistics statistics,
                            const GradientResults& results) {
  for (std::int64_t c = 0; c < limbs.channels; ++c) {
    const DoubleDouble<double> dy = total_of(limbs, kSumOfValues, c);
    results.sums.dy[c] = dy.hi + dy.lo;
    results.sums.dy_xhat[c] = gradient_sum_with_xhat(dy, total_of(limbs, kSumOfProducts, c),
                                                     statistics.mean_lo[c], statistics.inv_std[c]);
    use_gradient_sums(results, c);
  }
}

// The value rounded to the dtype.
double rounded(double value, DType dtype) {
  return with_element_type(dtype, [&]<class Element>(Element*) {
    return static_cast<double>(widen(round_once<Element>(value)));
  });
}

double activated(const ActivationFunction& activation, double z) {
  double y = 0.0;
  with_function<double>(activation, [&](const auto& function) { y = function(z); });
  return y;
}

double gradient(const ActivationFunction& activation, double z, double dy) {
  double dz = 0.0;
  with_function<double>(activation, [&](const auto& function) { dz = function.gradient(z, dy); });
  return dz;
}

// Sets y(n, c, p) to value(n, c, p) for all elements.
template <class Value>
void fill(const MutableTensorView& y, const Value& value) {
  for (std::int64_t n = 0; n < y.samples; ++n) {
    for (std::int64_t c = 0; c < y.channels; ++c) {
      for (std::int64_t p = 0; p < y.positions; ++p) write(y, n, c, p, value(n, c, p));
    }
  }
}

// Owns memory for a tensor with x's shape and dtype.
class TensorLike {
 public:
  explicit TensorLike(const TensorView& x)
      : bytes_(static_cast<std::size_t>(x.channels * x.elements_per_channel() * size_of(x.dtype))),
        view_(channels_first(static_cast<void*>(bytes_.data()), x.dtype, x.samples, x.channels,
                             x.positions)) {}

  [[nodiscard]] const MutableTensorView& view() const { return view_; }

 private:
  AlignedVector<std::byte> bytes_;
  MutableTensorView view_;
};

// Writes z = weight * xhat + bias.
void write_z(const TensorView& x, Statistics statistics, const AffineActivation& affine,
             const MutableTensorView& z) {
  fill(z, [&](std::int64_t n, std::int64_t c, std::int64_t p) {
    const double scale = channel_value(affine.weight, c, 1.0) * statistics.inv_std[c];
    const double centered = (read(x, n, c, p) - statistics.mean_hi[c]) - statistics.mean_lo[c];
    return centered * scale + channel_value(affine.bias, c, 0.0);
  });
}

void normalize(const Execution& /*execution*/, const TensorView& x, Statistics statistics,
               const AffineActivation& affine, const TensorView& residual,
               const MutableTensorView& y) {
  write_z(x, statistics, affine, y);
  if (affine.activation.kind == Activation::kNone) return;
  fill(y, [&](std::int64_t n, std::int64_t c, std::int64_t p) {
    double z = read(y.read_only(), n, c, p);
    if (residual.data != nullptr) z = rounded(z + read(residual, n, c, p), y.dtype);
    return activated(affine.activation, z);
  });
}

void gradient_of_output(const Execution& /*execution*/, const TensorView& y, const TensorView& dy,
                        const ActivationFunction& activation, const MutableTensorView& dz) {
  fill(dz, [&](std::int64_t n, std::int64_t c, std::int64_t p) {
    return gradient(activation, read(y, n, c, p), read(dy, n, c, p));
  });
}

void activation_gradient(const Execution& execution, const TensorView& x, const TensorView& dy,
                         Statistics statistics, const AffineActivation& affine,
                         const MutableTensorView& dz) {
  const TensorLike z(x);
  write_z(x, statistics, affine, z.view());
  // gradient_of_output() evaluates the gradient at its first argument; here that is z itself.
  gradient_of_output(execution, z.view().read_only(), dy, affine.activation, dz);
}

// Calls use(dz): with dy if there is no activation.
template <class Use>
void with_dz(const Execution& execution, const TensorView& x, const TensorView& dy,
             Statistics statistics, const AffineActivation& affine, const Use& use) {
  if (affine.activation.kind == Activation::kNone) return use(dy);
  const TensorLike dz(x);
  activation_gradient(execution, x, dy, statistics, affine, dz.view());
  use(dz.view().read_only());
}

void add_gradient_sums(const Execution& execution, const TensorView& x, const TensorView& dy,
                       Statistics statistics, const AffineActivation& affine, LimbsView limbs) {
  with_dz(execution, x, dy, statistics, affine, [&](const TensorView& dz) {
    add_sums(x, limbs, [&](std::int64_t n, std::int64_t c, std::int64_t p) {
      return std::pair(read(dz, n, c, p), read(x, n, c, p) - statistics.mean_hi[c]);
    });
  });
}

void input_gradient(const Execution& execution, const TensorView& x, const TensorView& dy,
                    Statistics statistics, const AffineActivation& affine, GradientSums sums,
                    double count, const MutableTensorView& dx) {
  with_dz(execution, x, dy, statistics, affine, [&](const TensorView& dz) {
    fill(dx, [&](std::int64_t n, std::int64_t c, std::int64_t p) {
      const double inv_std = statistics.inv_std[c];
      const double scale = channel_value(affine.weight, c, 1.0) * inv_std;
      const double xhat =
          ((read(x, n, c, p) - statistics.mean_hi[c]) - statistics.mean_lo[c]) * inv_std;
      return scale * ((read(dz, n, c, p) - sums.dy[c] / count) - xhat * (sums.dy_xhat[c] / count));
    });
  });
}

}  // namespace

constinit const Kernels kKernels{
    .name = "reference",
    .can_run = can_run,
    .add_moments = add_moments,
    .finalize_moments = finalize_moments,
    .normalize = normalize,
    .add_gradient_sums = add_gradient_sums,
    .finalize_gradient_sums = finalize_gradient_sums,
    .input_gradient = input_gradient,
    .activation_gradient = activation_gradient,
    .gradient_of_output = gradient_of_output,
};

}  // namespace normscope::reference
