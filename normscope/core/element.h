// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "normscope/core/attributes.h"
#include "normscope/core/dtype.h"

namespace normscope {

// Storage for the 16-bit types. They have no arithmetic: elements are widened to float32 first.
//
// Device code has instructions for these conversions. They give the bits of the code below them,
// except for NaN: narrowed by an instruction, every NaN becomes 0x7FFF, without its sign and
// payload.
struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

// The type in which arithmetic on an element type is done.
template <class Element>
struct ArithmeticType {
  using Type = float;
};
template <>
struct ArithmeticType<double> {
  using Type = double;
};
template <class Element>
using Arithmetic = typename ArithmeticType<Element>::Type;

NORMSCOPE_INLINE float widen(float x) noexcept { return x; }
NORMSCOPE_INLINE double widen(double x) noexcept { return x; }
NORMSCOPE_INLINE float widen(BFloat16 x) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16U);
}
NORMSCOPE_INLINE float widen(Float16 x) noexcept {
#if defined(__CUDA_ARCH__)
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#else
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000U) << 16U;
  const std::uint32_t exponent = (x.bits >> 10U) & 0x1FU;
  const std::uint32_t fraction = x.bits & 0x3FFU;
  if (exponent == 0) {  // zero or denormal: fraction * 2^-24
    const float magnitude = static_cast<float>(fraction) * 0x1p-24F;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
  const std::uint32_t wide_exponent = exponent == 0x1FU ? 0xFFU : exponent + (127U - 15U);
  return std::bit_cast<float>(sign | (wide_exponent << 23U) | (fraction << 13U));
#endif
}

#if defined(__CUDA_ARCH__)
// Two numbers narrowed by one instruction: the bits of low, and above them those of high.
template <class Element>
NORMSCOPE_INLINE std::uint32_t narrow_pair(float low, float high) noexcept {
  std::uint32_t pair;
  if constexpr (std::is_same_v<Element, BFloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}
#endif

// Rounds to the nearest element, ties to even.
template <class Element, class Real>
Element narrow(Real x) noexcept = delete;
template <>
NORMSCOPE_INLINE float narrow<float>(float x) noexcept {
  return x;
}
template <>
NORMSCOPE_INLINE float narrow<float>(double x) noexcept {
  return static_cast<float>(x);
}
template <>
NORMSCOPE_INLINE double narrow<double>(double x) noexcept {
  return x;
}
template <>
NORMSCOPE_INLINE BFloat16 narrow<BFloat16>(float x) noexcept {
#if defined(__CUDA_ARCH__)
  return {static_cast<std::uint16_t>(narrow_pair<BFloat16>(x, 0.0F))};
#else
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  if (x != x) return {static_cast<std::uint16_t>((bits >> 16U) | 0x40U)};
  return {static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16U) & 1U)) >> 16U)};
#endif
}
template <>
NORMSCOPE_INLINE Float16 narrow<Float16>(float x) noexcept {
#if defined(__CUDA_ARCH__)
  return {static_cast<std::uint16_t>(narrow_pair<Float16>(x, 0.0F))};
#else
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16U) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return {static_cast<std::uint16_t>(sign | 0x7E00U)};   // NaN
  if (magnitude >= 0x477FF000U) return {static_cast<std::uint16_t>(sign | 0x7C00U)};  // >= 65520
  if (magnitude < 0x38800000U) {
    // Below 2^-14: adding 1/2 lets the float32 addition round at float16's last bit, 2^-24.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return {
        static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3F000000U))};
  }
  const std::uint32_t rounded = magnitude + 0xFFFU + ((magnitude >> 13U) & 1U);
  return {static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13U))};
#endif
}

// Rounds a double to the element type with a single rounding. The conversion to a 16-bit type goes
// through a float32 rounded to odd, which keeps what the second rounding needs (Boldo and Melquiond
// 2008).
template <class Element>
NORMSCOPE_INLINE Element round_once(double x) noexcept {
  if constexpr (sizeof(Element) >= sizeof(float)) {
    return narrow<Element>(x);
  } else {
    float nearest = static_cast<float>(x);
    const auto rounded = static_cast<double>(nearest);
    if (rounded != x && rounded - rounded == 0.0) {
      std::uint32_t bits = std::bit_cast<std::uint32_t>(nearest);
      const bool is_beyond = x < 0.0 ? rounded < x : rounded > x;
      if (is_beyond) bits -= 1U;
      nearest = std::bit_cast<float>(bits | 1U);
    }
    return narrow<Element>(nearest);
  }
}

// Calls `function` with a null pointer of the element type of `dtype`.
template <class Function>
NORMSCOPE_INLINE decltype(auto) with_element_type(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kFloat64: return function(static_cast<double*>(nullptr));
    case DType::kBFloat16: return function(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16: return function(static_cast<Float16*>(nullptr));
    case DType::kFloat32: break;
  }
  return function(static_cast<float*>(nullptr));
}

}  // namespace normscope
