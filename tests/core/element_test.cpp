// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/element.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include <gtest/gtest.h>

namespace normscope {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A 16-bit type as IEEE 754 describes it.
template <class Element>
struct Format;
template <>
struct Format<BFloat16> {
  static constexpr int kFractionBits = 7;
  static constexpr int kBias = 127;
};
template <>
struct Format<Float16> {
  static constexpr int kFractionBits = 10;
  static constexpr int kBias = 15;
};

// The value of `bits` by its definition, or NaN.
template <class Element>
double value_of(std::uint32_t bits) {
  constexpr int kFractionBits = Format<Element>::kFractionBits;
  const std::uint32_t exponent = (bits & 0x7FFFU) >> kFractionBits;
  const std::uint32_t fraction = bits & ((1U << kFractionBits) - 1U);
  const std::uint32_t special = 0x7FFFU >> kFractionBits;
  const double sign = (bits & 0x8000U) != 0 ? -1.0 : 1.0;
  if (exponent == special) {
    return fraction == 0 ? sign * kInfinity : std::numeric_limits<double>::quiet_NaN();
  }
  const double significand = exponent == 0 ? fraction : fraction + (1U << kFractionBits);
  const int scale = static_cast<int>(exponent == 0 ? 1 : exponent) - Format<Element>::kBias;
  return sign * std::ldexp(significand, scale - kFractionBits);
}

// The bits of infinity: magnitudes are ordered as their bits are.
template <class Element>
constexpr std::uint32_t kInfinityBits =
    (0x7FFFU >> Format<Element>::kFractionBits) << Format<Element>::kFractionBits;

template <class Element>
std::uint32_t bits_of(Element x) {
  return x.bits;
}

template <class Element>
class SixteenBits : public ::testing::Test {};
using SixteenBitTypes = ::testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(SixteenBits, SixteenBitTypes);

TYPED_TEST(SixteenBits, EveryValueWidensToItself) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const double expected = value_of<TypeParam>(bits);

    const float wide = widen(TypeParam{static_cast<std::uint16_t>(bits)});

    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(wide)) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(wide), expected) << bits;
      ASSERT_EQ(std::signbit(wide), (bits & 0x8000U) != 0) << bits;
    }
  }
}

TYPED_TEST(SixteenBits, EveryValueNarrowsToItself) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const float wide = widen(TypeParam{static_cast<std::uint16_t>(bits)});

    const TypeParam narrowed = narrow<TypeParam>(wide);
    const TypeParam rounded = round_once<TypeParam>(static_cast<double>(wide));

    if (std::isnan(wide)) {
      ASSERT_TRUE(std::isnan(widen(narrowed))) << bits;
      ASSERT_TRUE(std::isnan(widen(rounded))) << bits;
    } else {
      ASSERT_EQ(bits_of(narrowed), bits);
      ASSERT_EQ(bits_of(rounded), bits);
    }
  }
}

// Checks the halfway points between all neighbours, from the least denormal to infinity, and the
// numbers of a wider type that are next to these points.
template <class Element, class Wide, class Round>
void expect_nearest(const Round& round) {
  constexpr Wide kInfinityOfWide = std::numeric_limits<Wide>::infinity();
  for (std::uint32_t below = 0; below < kInfinityBits<Element>; ++below) {
    const std::uint32_t above = below + 1;
    const double low = value_of<Element>(below);
    // Infinity takes the place of the next number.
    const double high = above == kInfinityBits<Element> ? low + (low - value_of<Element>(below - 1))
                                                        : value_of<Element>(above);
    const auto halfway = static_cast<Wide>((low + high) / 2.0);
    ASSERT_EQ(static_cast<double>(halfway), (low + high) / 2.0);
    const std::uint32_t even = below % 2 == 0 ? below : above;

    for (const std::uint32_t sign : {0U, 0x8000U}) {
      const Wide signed_halfway = sign == 0 ? halfway : -halfway;
      const Wide outwards =
          std::nextafter(signed_halfway, sign == 0 ? kInfinityOfWide : -kInfinityOfWide);
      const Wide inwards = std::nextafter(signed_halfway, Wide{0});

      ASSERT_EQ(bits_of(round(signed_halfway)), sign | even);
      ASSERT_EQ(bits_of(round(outwards)), sign | above);
      ASSERT_EQ(bits_of(round(inwards)), sign | below);
    }
  }
}

TYPED_TEST(SixteenBits, HalfwayGoesToEvenAndAllElseToTheNearest) {
  expect_nearest<TypeParam, float>([](float x) { return narrow<TypeParam>(x); });
}

// A float64 so close to a halfway point that a float32 in between would be rounded onto that point.
TYPED_TEST(SixteenBits, RoundOnceDoesNotRoundTwice) {
  expect_nearest<TypeParam, double>([](double x) { return round_once<TypeParam>(x); });
}

TYPED_TEST(SixteenBits, TooLargeBecomesInfinityAndTooSmallZero) {
  const std::uint32_t infinity = kInfinityBits<TypeParam>;
  for (const double large : {std::ldexp(1.0, 128), 1e300, kInfinity}) {
    EXPECT_EQ(bits_of(round_once<TypeParam>(large)), infinity);
    EXPECT_EQ(bits_of(round_once<TypeParam>(-large)), 0x8000U | infinity);
  }
  EXPECT_EQ(bits_of(narrow<TypeParam>(std::numeric_limits<float>::max())), infinity);
  EXPECT_EQ(bits_of(narrow<TypeParam>(-INFINITY)), 0x8000U | infinity);
  for (const double small : {1e-60, 5e-324}) {
    EXPECT_EQ(bits_of(round_once<TypeParam>(small)), 0U);
    EXPECT_EQ(bits_of(round_once<TypeParam>(-small)), 0x8000U);
  }
  EXPECT_TRUE(std::isnan(widen(round_once<TypeParam>(std::nan("")))));
}

TEST(ElementTest, Float32AndFloat64RoundOnceAsTheCompilerDoes) {
  EXPECT_EQ(round_once<float>(1.0 + 0x1p-24), 1.0F);
  EXPECT_EQ(round_once<float>(1.0 + 0x1.8p-24), 1.0F + 0x1p-23F);
  EXPECT_EQ(round_once<float>(1e300), INFINITY);
  EXPECT_EQ(round_once<double>(0.1), 0.1);
}

TEST(ElementTest, ArithmeticIsFloat32UpToFloat32AndFloat64Above) {
  static_assert(std::is_same_v<Arithmetic<BFloat16>, float>);
  static_assert(std::is_same_v<Arithmetic<Float16>, float>);
  static_assert(std::is_same_v<Arithmetic<float>, float>);
  static_assert(std::is_same_v<Arithmetic<double>, double>);
  for (const DType dtype : kAllDTypes) {
    const auto bytes = with_element_type(
        dtype, []<class Element>(Element*) { return static_cast<std::int64_t>(sizeof(Element)); });

    EXPECT_EQ(bytes, size_of(dtype)) << name_of(dtype);
  }
}

}  // namespace
}  // namespace normscope
