// SPDX-License-Identifier: Apache-2.0
//
// Blocks of elements, and narrowing to them. Included once by each target (vector.h says why).

// A block: as many elements as fit one vector's bytes, held as one vector, or as two for 16-bit
// elements. bfloat16 elements are split into even and odd indices, each a shift or a mask away from
// float32. All other types are in order.
template <class Element>
inline constexpr int kBlockVectors = sizeof(Element) == 2 ? 2 : 1;
template <class Element>
inline constexpr bool kBlockIsInterleaved = std::is_same_v<Element, BFloat16>;
template <class Element>
struct Block {
  Vector<Arithmetic<Element>> vectors[kBlockVectors<Element>];
};

inline constexpr std::uint32_t kUpperHalf = 0xFFFF0000U;

template <class Element>
NORMSCOPE_INLINE Block<Element> load_block(const Element* from) {
  if constexpr (kBlockIsInterleaved<Element>) {
    const Words words = load_bytes<Words>(from);
    return {reinterpret_cast<Floats>(words << 16U), reinterpret_cast<Floats>(words & kUpperHalf)};
  } else if constexpr (kBlockVectors<Element> == 2) {
    return {load(from), load(from + kFloats)};
  } else {
    return {load(from)};
  }
}

template <int kFirst, class AnyVector, std::size_t... kIndices>
NORMSCOPE_INLINE AnyVector every_second(AnyVector low, AnyVector high,
                                        std::index_sequence<kIndices...>) {
  return __builtin_shufflevector(low, high, (2 * kIndices + kFirst)...);
}

// Loads the `count` elements starting at `from`, fewer than a block, as load_partial does.
template <class Element>
NORMSCOPE_INLINE Block<Element> load_partial_block(const Element* from, std::int64_t count) {
  constexpr std::int64_t kWidth = kLanesOf<Arithmetic<Element>>;
  if constexpr (kBlockVectors<Element> == 1) {
    return {load_partial(from, count)};
  } else {
    const Floats low = count < kWidth ? load_partial(from, count) : load(from);
    const Floats high = count > kWidth ? load_partial(from + kWidth, count - kWidth) : Floats{};
    if constexpr (!kBlockIsInterleaved<Element>) return {low, high};
    constexpr auto kIndices = std::make_index_sequence<kWidth>{};
    return {every_second<0>(low, high, kIndices), every_second<1>(low, high, kIndices)};
  }
}

// How many of the first `count` elements of a block are in its vector v.
template <class Element>
NORMSCOPE_INLINE std::int64_t count_in_vector(std::int64_t count, int v) {
  if constexpr (kBlockIsInterleaved<Element>) return (count + 1 - v) / 2;
  return count - v * kLanesOf<Arithmetic<Element>>;
}

// The elements of value with an index below `count`; 0 for the others.
template <class Real>
NORMSCOPE_INLINE Vector<Real> first_elements(Vector<Real> value, std::int64_t count) {
  constexpr auto kIndices = std::make_index_sequence<kLanesOf<Real>>{};
  const Vector<Real> indices = iota<Vector<Real>>(kIndices);
  return indices < broadcast(static_cast<Real>(count)) ? value : Vector<Real>{};
}

// Narrowing two vectors to one of 16-bit elements, to nearest, ties to even.

// The upper 16 bits of each word.
NORMSCOPE_INLINE Words upper_halves(Words low, Words high) {
#if defined(__AVX512F__)
  return join_halves(
      _mm512_maskz_cvtepi32_epi16(kAllFloats, reinterpret_cast<__m512i>(low >> 16U)),
      _mm512_maskz_cvtepi32_epi16(kAllFloats, reinterpret_cast<__m512i>(high >> 16U)));
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packs_epi32(_mm256_srai_epi32(reinterpret_cast<__m256i>(low), 16),
                                            _mm256_srai_epi32(reinterpret_cast<__m256i>(high), 16));
  constexpr int kQuartersInOrder = 0xD8;  // packing works on each half of the register separately
  return reinterpret_cast<Words>(_mm256_permute4x64_epi64(packed, kQuartersInOrder));
#elif defined(__SSE2__)
  return reinterpret_cast<Words>(
      _mm_packs_epi32(_mm_srai_epi32(reinterpret_cast<__m128i>(low), 16),
                      _mm_srai_epi32(reinterpret_cast<__m128i>(high), 16)));
#else
  const HalfWords halves[2] = {__builtin_convertvector(low >> 16U, HalfWords),
                               __builtin_convertvector(high >> 16U, HalfWords)};
  return load_bytes<Words>(halves);
#endif
}

// Rounds to the upper 16 bits. A NaN stays a NaN: NaNs from arithmetic or from bfloat16 elements
// have no bits in the lower half that could carry past the last NaN.
NORMSCOPE_INLINE Words round_to_upper_half(Floats value) {
  const Words bits = reinterpret_cast<Words>(value);
  return bits + 0x7FFFU + ((bits >> 16U) & 1U);
}

NORMSCOPE_INLINE Words narrow_pair(const BFloat16*, Floats low, Floats high) {
  return upper_halves(round_to_upper_half(low), round_to_upper_half(high));
}

#if !defined(__AVX512F__) && !defined(__F16C__)
// Out of line, because in software it takes many instructions.
[[maybe_unused, gnu::noinline]] Words narrow_in_software(Floats low, Floats high) {
  std::uint16_t halves[2 * kFloats];
  for (int i = 0; i < kFloats; ++i) {
    halves[i] = narrow<Float16>(low[i]).bits;
    halves[kFloats + i] = narrow<Float16>(high[i]).bits;
  }
  return load_bytes<Words>(halves);
}
#endif

NORMSCOPE_INLINE Words narrow_pair(const Float16*, Floats low, Floats high) {
#if defined(__AVX512F__)
  return join_halves(
      _mm512_maskz_cvtps_ph(kAllFloats, reinterpret_cast<__m512>(low), _MM_FROUND_TO_NEAREST_INT),
      _mm512_maskz_cvtps_ph(kAllFloats, reinterpret_cast<__m512>(high), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  return reinterpret_cast<Words>(_mm256_inserti128_si256(
      _mm256_castsi128_si256(
          _mm256_cvtps_ph(reinterpret_cast<__m256>(low), _MM_FROUND_TO_NEAREST_INT)),
      _mm256_cvtps_ph(reinterpret_cast<__m256>(high), _MM_FROUND_TO_NEAREST_INT), 1));
#else
  return narrow_in_software(low, high);
#endif
}

// The bytes of a block whose vectors hold its elements in order.
template <class Element>
NORMSCOPE_INLINE Words narrow_in_order(const Block<Element>& block) {
  if constexpr (kBlockVectors<Element> == 2) {
    return narrow_pair(static_cast<const Element*>(nullptr), block.vectors[0], block.vectors[1]);
  } else {
    return reinterpret_cast<Words>(block.vectors[0]);
  }
}

// The bytes of a block.
template <class Element>
NORMSCOPE_INLINE Words narrow_block(const Block<Element>& block) {
  if constexpr (kBlockIsInterleaved<Element>) {
    return round_to_upper_half(block.vectors[0]) >> 16U |
           (round_to_upper_half(block.vectors[1]) & kUpperHalf);
  } else {
    return narrow_in_order(block);
  }
}
