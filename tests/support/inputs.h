// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "tests/support/random.h"
#include "tests/support/tensor.h"

namespace normscope::testing {

// Kinds of inputs that arithmetic may get wrong.
enum class Inputs {
  kCentred,
  kMeanOf1e3Deviations,
  kMeanOf1e4Deviations,
  kMeanOf1e6Deviations,
  kConstant,
  kHuge,  // squares overflow the type of the arithmetic, except float64
  kTiny,  // squares underflow
  kDenormal,
  kPaddedCorner,  // zeros next to off-centre data: the first element says little of the others
  kInfinity,      // one element of every third channel
  kNaN,           // one element of every third channel
};

inline constexpr Inputs kAllInputs[] = {Inputs::kCentred,
                                        Inputs::kMeanOf1e3Deviations,
                                        Inputs::kMeanOf1e4Deviations,
                                        Inputs::kMeanOf1e6Deviations,
                                        Inputs::kConstant,
                                        Inputs::kHuge,
                                        Inputs::kTiny,
                                        Inputs::kDenormal,
                                        Inputs::kPaddedCorner,
                                        Inputs::kInfinity,
                                        Inputs::kNaN};

[[nodiscard]] inline std::string name_of(Inputs inputs) {
  switch (inputs) {
    case Inputs::kCentred: return "centred";
    case Inputs::kMeanOf1e3Deviations: return "mean_of_1e3_deviations";
    case Inputs::kMeanOf1e4Deviations: return "mean_of_1e4_deviations";
    case Inputs::kMeanOf1e6Deviations: return "mean_of_1e6_deviations";
    case Inputs::kConstant: return "constant";
    case Inputs::kHuge: return "huge";
    case Inputs::kTiny: return "tiny";
    case Inputs::kDenormal: return "denormal";
    case Inputs::kPaddedCorner: return "padded_corner";
    case Inputs::kInfinity: return "infinity";
    case Inputs::kNaN: return "nan";
  }
  return "unknown";
}

// Sizes that a type can represent.
struct Sizes {
  double huge;
  double tiny;
  double denormal;
};
[[nodiscard]] inline Sizes sizes_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return {1e100, 1e-200, 1e-310};
    case DType::kFloat16: return {3e4, 1e-4, 1e-6};
    case DType::kFloat32:
    case DType::kBFloat16: break;
  }
  return {1e30, 1e-30, 1e-40};
}

// Independent streams of random numbers.
enum class Role : std::uint64_t { kX = 1, kDy, kParameters };

// The element of sample n (its number in the whole batch, on whatever rank), before rounding to
// dtype.
[[nodiscard]] inline double input_at(Inputs inputs, DType dtype, Role role, std::int64_t n,
                                     std::int64_t c, std::int64_t p) {
  const auto seed = static_cast<std::uint64_t>((n * 8191 + c) * 1048573 + p);
  const double uniform = Random(seed * 4 + static_cast<std::uint64_t>(role)).uniform();
  const bool is_odd_one = n == 1 && c % 3 == 0 && p == 0;
  const Sizes sizes = sizes_of(dtype);
  switch (inputs) {
    case Inputs::kCentred: return uniform;
    case Inputs::kMeanOf1e3Deviations: return 1e3 + uniform;
    case Inputs::kMeanOf1e4Deviations: return 1e4 + uniform;
    case Inputs::kMeanOf1e6Deviations: return std::fmin(1e6, sizes.huge) + uniform;
    case Inputs::kConstant: return static_cast<double>(c) + 0.1;
    case Inputs::kHuge: return sizes.huge * uniform;
    case Inputs::kTiny: return sizes.tiny * uniform;
    case Inputs::kDenormal: return sizes.denormal * uniform;
    case Inputs::kPaddedCorner: return n % 2 == 0 && p < 40 ? 0.0 : 1e3 + uniform;
    case Inputs::kInfinity: return is_odd_one ? std::numeric_limits<double>::infinity() : uniform;
    case Inputs::kNaN: return is_odd_one ? std::nan("") : uniform;
  }
  return 0.0;
}

// The samples 0 ... count - 1.
[[nodiscard]] inline std::vector<std::int64_t> first_samples(std::int64_t count) {
  std::vector<std::int64_t> samples(static_cast<std::size_t>(count));
  std::iota(samples.begin(), samples.end(), std::int64_t{0});
  return samples;
}

// Fills the tensor with the given samples of the whole batch.
inline void fill(Tensor& tensor, Inputs inputs, Role role, std::span<const std::int64_t> samples) {
  tensor.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
    tensor.set(n, c, p,
               input_at(inputs, tensor.dtype(), role, samples[static_cast<std::size_t>(n)], c, p));
  });
}
inline void fill(Tensor& tensor, Inputs inputs, Role role) {
  fill(tensor, inputs, role, first_samples(tensor.samples()));
}

}  // namespace normscope::testing
