// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "normscope/core/element.h"
#include "normscope/core/tensor_view.h"
#include "normscope/kernels/device_kernels.h"

namespace normscope {

// Writes the coefficients of a slice to `to` [slices, ., C], for a caller on the host that applies
// them itself; nothing without data. formula_of<Real>(c) returns those of a channel, in a struct
// that holds only Reals.
template <class FormulaOf>
void write_coefficients(Coefficients to, std::int64_t slice, const TensorView& x,
                        const FormulaOf& formula_of) {
  if (to.data == nullptr) return;
  with_element_type(x.dtype, [&]<class Element>(Element*) {
    using Real = Arithmetic<Element>;
    using Formula = decltype(formula_of.template operator()<Real>(0));
    constexpr std::size_t kNumbers = sizeof(Formula) / sizeof(Real);
    Real* number = static_cast<Real*>(to.data) + slice * std::int64_t{kNumbers} * x.channels;
    for (std::int64_t c = 0; c < x.channels; ++c, ++number) {
      const auto numbers =
          std::bit_cast<std::array<Real, kNumbers>>(formula_of.template operator()<Real>(c));
      for (std::size_t i = 0; i < kNumbers; ++i) {
        number[static_cast<std::int64_t>(i) * x.channels] = numbers[i];
      }
    }
  });
}

}  // namespace normscope
