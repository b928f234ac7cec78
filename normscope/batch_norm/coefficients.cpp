// SPDX-License-Identifier: Apache-2.0
#include "normscope/batch_norm/coefficients.h"

#include <array>
#include <bit>
#include <cstddef>

#include "normscope/core/element.h"
#include "normscope/kernels/finalize.h"

namespace normscope {
namespace {

// Writes the members of formula_of(c), a struct that holds only Reals, for every channel.
template <class Real, class FormulaOf>
void write(Real* to, std::int64_t channels, const FormulaOf& formula_of) {
  using Formula = decltype(formula_of(0));
  constexpr std::size_t kNumbers = sizeof(Formula) / sizeof(Real);
  for (std::int64_t c = 0; c < channels; ++c) {
    const auto numbers = std::bit_cast<std::array<Real, kNumbers>>(formula_of(c));
    for (std::size_t i = 0; i < kNumbers; ++i) {
      to[static_cast<std::int64_t>(i) * channels + c] = numbers[i];
    }
  }
}

// Calls function(pointer) with a typed pointer to the coefficients of a slice, `numbers` per
// channel. Does nothing if they are not wanted.
template <class Function>
void with_slice(const WantedCoefficients& wanted, std::int64_t slice, std::int64_t numbers,
                const Function& function) {
  if (wanted.to.data == nullptr) return;
  with_element_type(wanted.x_dtype, [&]<class Element>(Element*) {
    function(static_cast<Arithmetic<Element>*>(wanted.to.data) + slice * numbers * wanted.channels);
  });
}

}  // namespace

void WantedCoefficients::write_normalize(std::int64_t slice, Statistics statistics,
                                         ChannelView weight, ChannelView bias) const {
  with_slice(*this, slice, Coefficients::kNormalize, [&]<class Real>(Real* of_slice) {
    write(of_slice, channels, [&](std::int64_t c) {
      return normalize_coefficients<Real>(statistics, weight, bias, c);
    });
  });
}

void WantedCoefficients::write_input_gradient(std::int64_t slice, Statistics statistics,
                                              ChannelView weight, GradientSums sums,
                                              double n) const {
  with_slice(*this, slice, Coefficients::kInputGradient, [&]<class Real>(Real* of_slice) {
    write(of_slice, channels, [&](std::int64_t c) {
      return input_gradient_coefficients<Real>(statistics, weight, sums, n, c);
    });
  });
}

}  // namespace normscope
