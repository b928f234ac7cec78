// SPDX-License-Identifier: Apache-2.0
//
// Activations of vectors, and the sweeps that apply them. Included once by each target (vector.h
// says why).

// Rounds a value to Element, as a sequence of single operations would store it.
template <class Element>
NORMSCOPE_INLINE float rounded(float value) {
  return widen(narrow<Element>(value));
}
template <class Element>
NORMSCOPE_INLINE double rounded(double value) {
  return value;
}
template <class Element>
NORMSCOPE_INLINE Doubles rounded(Doubles value) {
  return value;
}
template <class Element>
NORMSCOPE_INLINE Floats rounded(Floats value) {
  if constexpr (std::is_same_v<Element, BFloat16>) {
    return reinterpret_cast<Floats>(round_to_upper_half(value) & kUpperHalf);
  } else if constexpr (std::is_same_v<Element, Float16>) {
    Float16 elements[2 * kFloats];
    store_bytes(elements, narrow_pair(elements, value, value));
    return load(elements);
  } else {
    return value;
  }
}

// Converts a function object on scalars to one on Value, a scalar or a vector.
template <class Value, class Real>
NORMSCOPE_INLINE Clip<Value> function_of(const Clip<Real>& function) {
  return {Value{} + function.top};
}
template <class Value, class Real>
NORMSCOPE_INLINE LeakyRelu<Value> function_of(const LeakyRelu<Real>& function) {
  return {Value{} + function.slope};
}
template <class Value, class Real>
NORMSCOPE_INLINE HardSwish<Value> function_of(const HardSwish<Real>& /*function*/) {
  return {};
}
template <class Value, class Real>
NORMSCOPE_INLINE Silu<Value> function_of(const Silu<Real>& /*function*/) {
  return {};
}

// Inputs of the sweeps, as in apply.h. The result of every operation is rounded to Element.

// activation(formula(x))
template <class Element, class Function>
struct ActivatedInput {
  const Element* x;
  Function function;

  template <class Formula, class Load>
  NORMSCOPE_INLINE auto value(const Formula& formula, const Load& load) const {
    const auto z = rounded<Element>(formula(load(x)));
    return function_of<std::remove_const_t<decltype(z)>>(function)(z);
  }
};

// activation(formula(x) + residual)
template <class Element, class Function>
struct ActivatedSum {
  const Element* x;
  const Element* residual;
  Function function;

  template <class Formula, class Load>
  NORMSCOPE_INLINE auto value(const Formula& formula, const Load& load) const {
    const auto z = rounded<Element>(rounded<Element>(formula(load(x))) + load(residual));
    return function_of<std::remove_const_t<decltype(z)>>(function)(z);
  }
};

// dy * activation'(formula(x))
template <class Element, class Function>
struct ActivationGradient {
  const Element* x;
  const Element* dy;
  Function function;

  template <class Formula, class Load>
  NORMSCOPE_INLINE auto value(const Formula& formula, const Load& load) const {
    const auto z = rounded<Element>(formula(load(x)));
    return function_of<std::remove_const_t<decltype(z)>>(function).gradient(z, load(dy));
  }
};

// The same from the activation's output y, for activations with output_tells_gradient(). There is
// no formula.
template <class Element, class Function>
struct GradientOfOutput {
  const Element* y;
  const Element* dy;
  Function function;

  template <class Formula, class Load>
  NORMSCOPE_INLINE auto value(const Formula& /*formula*/, const Load& load) const {
    const auto output = load(y);
    return function_of<std::remove_const_t<decltype(output)>>(function).gradient(output, load(dy));
  }
};

// The input gradient for dy * activation'(z), where z is the formula of y applied to x.
template <class Element, class Function>
struct ActivatedTwoInputs {
  const Element* x;
  const Element* dy;
  Function function;

  template <class Formula, class Load>
  NORMSCOPE_INLINE auto value(const Formula& formula, const Load& load) const {
    const ActivationGradient<Element, Function> gradient{x, dy, function};
    return formula.input_gradient(load(x),
                                  rounded<Element>(gradient.value(formula.normalize(), load)));
  }
};
