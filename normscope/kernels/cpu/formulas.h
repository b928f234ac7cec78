// SPDX-License-Identifier: Apache-2.0
//
// The coefficients of formulas for many channels. Included once by each target (vector.h says why).

// An array [C] for each member of the formula, in their order.
template <template <class> class Formula, class Real>
struct FormulaArrays {
  static constexpr int kCount = sizeof(Formula<Real>) / sizeof(Real);

  const Real* arrays[kCount];

  // The first member of every formula.
  [[nodiscard]] NORMSCOPE_INLINE const Real* mean_hi() const noexcept { return arrays[0]; }

  // The channels from c on.
  [[nodiscard]] NORMSCOPE_INLINE FormulaArrays from(std::int64_t c) const noexcept {
    FormulaArrays from;
    for (int k = 0; k < kCount; ++k) from.arrays[k] = arrays[k] + c;
    return from;
  }
};

template <template <class> class Formula, class Real>
NORMSCOPE_INLINE FormulaArrays<Formula, Real> formula_arrays(const ChannelArrays& from) {
  FormulaArrays<Formula, Real> formulas;
  for (int k = 0; k < formulas.kCount; ++k) {
    formulas.arrays[k] = static_cast<const Real*>(from.first) + k * from.stride;
  }
  return formulas;
}

// The formula whose members are number_of(0), number_of(1), ...
template <class Formula, class NumberOf, std::size_t... kIndices>
NORMSCOPE_INLINE Formula formula_of(const NumberOf& number_of, std::index_sequence<kIndices...>) {
  return {number_of(kIndices)...};
}

// Loads the coefficients of channel c, or of a vector of channels starting at c.
template <class Value, template <class> class Formula, class Real>
NORMSCOPE_INLINE Formula<Value> formula_at(const FormulaArrays<Formula, Real>& formulas,
                                           std::int64_t c) {
  constexpr std::make_index_sequence<FormulaArrays<Formula, Real>::kCount> kIndices;
  const auto number_of = [&](std::size_t k) { return load_bytes<Value>(formulas.arrays[k] + c); };
  return formula_of<Formula<Value>>(number_of, kIndices);
}

template <template <class> class Formula, class Real>
NORMSCOPE_INLINE Formula<Vector<Real>> broadcast_formula(const Formula<Real>& one) {
  constexpr std::size_t kCount = sizeof(one) / sizeof(Real);
  const auto numbers = std::bit_cast<std::array<Real, kCount>>(one);
  const auto number_of = [&](std::size_t k) { return broadcast(numbers[k]); };
  return formula_of<Formula<Vector<Real>>>(number_of, std::make_index_sequence<kCount>());
}

// Where a result depends on no coefficients.
struct NoFormulas {};
struct NoFormula {};
template <class Value>
NORMSCOPE_INLINE NoFormula formula_at(const NoFormulas& /*formulas*/, std::int64_t /*c*/) {
  return {};
}
NORMSCOPE_INLINE NoFormula broadcast_formula(const NoFormula& formula) { return formula; }
