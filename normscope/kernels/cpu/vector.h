// SPDX-License-Identifier: Apache-2.0
//
// Vectors of one instruction set. Only target.cpp includes this file and those that refer to it,
// inside an unnamed namespace: no function compiled for one instruction set can then replace
// another's. Hence no include guard.
//
// Vectors are those of the compiler (GCC and Clang: vector_size), as wide as the target's flags
// allow. An operation on a vector applies to each of its elements; the width changes no bit.

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

inline constexpr int kFloats = kVectorBytes / 4;
inline constexpr int kDoubles = kVectorBytes / 8;

#if defined(__AVX512F__)
// For the masked forms of some instructions, used with all bits set: in GCC 12, the declarations of
// the plain forms warn about an unused value.
inline constexpr __mmask16 kAllFloats = 0xFFFF;
inline constexpr __mmask8 kAllDoubles = 0xFF;
#endif

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef double Doubles __attribute__((vector_size(kVectorBytes)));
typedef std::uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef float FloatsOfDoubles __attribute__((vector_size(kVectorBytes / 2)));
typedef std::uint16_t HalfWords __attribute__((vector_size(kVectorBytes / 2)));

// The vector with elements of type Real, which is float or double.
template <class Real>
using Vector = std::conditional_t<std::is_same_v<Real, double>, Doubles, Floats>;

// The number of elements of a Vector<Real>.
template <class Real>
inline constexpr int kLanesOf = kVectorBytes / static_cast<int>(sizeof(Real));

typedef std::uint64_t LongWords __attribute__((vector_size(kVectorBytes)));

template <class Any>
NORMSCOPE_INLINE Any load_bytes(const void* from) {
  Any value;
  __builtin_memcpy(&value, from, sizeof(Any));
  return value;
}

template <class Any>
NORMSCOPE_INLINE void store_bytes(void* to, Any value) {
  __builtin_memcpy(to, &value, sizeof(Any));
}

template <class Real>
NORMSCOPE_INLINE Vector<Real> broadcast(Real value) {
  return value - Vector<Real>{};  // x - 0 is x, even for -0
}

template <class AnyVector, std::size_t... kIndices>
NORMSCOPE_INLINE AnyVector iota(std::index_sequence<kIndices...>) {
  return AnyVector{kIndices...};
}

#if defined(__AVX512F__)
NORMSCOPE_INLINE Words join_halves(__m256i low, __m256i high) {
  return reinterpret_cast<Words>(
      _mm512_maskz_inserti64x4(kAllDoubles, _mm512_castsi256_si512(low), high, 1));
}
#endif

// The number of elements in a cache line.
template <class Element>
inline constexpr std::int64_t kLineElements =
    kCacheLine / static_cast<std::int64_t>(sizeof(Element));

// Prefetches the cache line at `from`, which may be past readable memory, into L2.
// docs/performance.md has the time that prefetching saves.
NORMSCOPE_INLINE void prefetch(const void* from) {
  constexpr int kForReading = 0;
  constexpr int kIntoL2 = 2;
  __builtin_prefetch(from, kForReading, kIntoL2);
}

// Loads, widened to the type of the arithmetic.

NORMSCOPE_INLINE Floats load(const float* from) { return load_bytes<Floats>(from); }
NORMSCOPE_INLINE Doubles load(const double* from) { return load_bytes<Doubles>(from); }

// GCC 12 takes five instructions instead of one for a conversion that doubles a vector's width.
NORMSCOPE_INLINE Words widen_words(HalfWords halves) {
#if defined(__AVX512F__)
  return reinterpret_cast<Words>(
      _mm512_maskz_cvtepu16_epi32(kAllFloats, reinterpret_cast<__m256i>(halves)));
#elif defined(__AVX2__)
  return reinterpret_cast<Words>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(halves)));
#else
  return __builtin_convertvector(halves, Words);
#endif
}

NORMSCOPE_INLINE Floats load(const BFloat16* from) {
  return reinterpret_cast<Floats>(widen_words(load_bytes<HalfWords>(from)) << 16U);
}

#if !defined(__AVX512F__) && !defined(__F16C__)
// Out of line, because in software it takes many instructions.
[[maybe_unused, gnu::noinline]] Floats widen_in_software(const Float16* from) {
  Floats wide{};
  for (int i = 0; i < kFloats; ++i) wide[i] = widen(from[i]);
  return wide;
}
#endif

NORMSCOPE_INLINE Floats load(const Float16* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(kAllFloats, load_bytes<__m256i>(from)));
#elif defined(__F16C__)
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(load_bytes<__m128i>(from)));
#else
  return widen_in_software(from);
#endif
}

// a * b + c for products that float64 holds exactly. Fused or not, the result is rounded once. The
// fused form runs on the units that multiply, and leaves those that only add free.
NORMSCOPE_INLINE Doubles add_exact_product(Doubles a, Doubles b, Doubles c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Doubles>(_mm512_fmadd_pd(
      reinterpret_cast<__m512d>(a), reinterpret_cast<__m512d>(b), reinterpret_cast<__m512d>(c)));
#elif defined(__FMA__)
  return reinterpret_cast<Doubles>(_mm256_fmadd_pd(
      reinterpret_cast<__m256d>(a), reinterpret_cast<__m256d>(b), reinterpret_cast<__m256d>(c)));
#else
  return a * b + c;
#endif
}

// a - b, as a fused multiplication by 1, which rounds the same. It runs on the units that multiply,
// and leaves those that only add free for the sums that follow.
template <class Value>
NORMSCOPE_INLINE Value subtract(Value a, Value b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<Value, Floats>) {
    return reinterpret_cast<Floats>(_mm512_fmsub_ps(
        reinterpret_cast<__m512>(a), _mm512_set1_ps(1.0F), reinterpret_cast<__m512>(b)));
  }
#elif defined(__FMA__)
  if constexpr (std::is_same_v<Value, Floats>) {
    return reinterpret_cast<Floats>(_mm256_fmsub_ps(
        reinterpret_cast<__m256>(a), _mm256_set1_ps(1.0F), reinterpret_cast<__m256>(b)));
  }
#endif
  return a - b;
}

// Loads `count` elements, fewer than a vector, then zeros. Out of line because it is rarely needed.
template <class Element, class Real = Arithmetic<Element>>
[[gnu::noinline]] Vector<Real> load_few(const Element* from, std::int64_t count) {
  Real few[kLanesOf<Real>] = {};
  for (std::int64_t i = 0; i < count; ++i) few[i] = widen(from[i]);
  return load(few);
}

// The same if a whole vector that ends with the last of these elements is readable. The other
// elements of the result are unspecified.
template <class Element>
NORMSCOPE_INLINE auto load_partial(const Element* from, std::int64_t count) {
  using Real = Arithmetic<Element>;
  constexpr std::int64_t kWidth = kLanesOf<Real>;
  const Vector<Real> up_to_last = load(from + count - kWidth);
#if defined(__AVX512F__)
  if constexpr (kWidth == 16) {
    const Words indices =
        iota<Words>(std::make_index_sequence<16>{}) - static_cast<unsigned>(count);
    return reinterpret_cast<Floats>(_mm512_maskz_permutexvar_ps(
        kAllFloats, reinterpret_cast<__m512i>(indices), reinterpret_cast<__m512>(up_to_last)));
  }
#elif defined(__AVX2__)
  if constexpr (kWidth == 8) {
    const Words indices = iota<Words>(std::make_index_sequence<8>{}) - static_cast<unsigned>(count);
    return reinterpret_cast<Floats>(_mm256_permutevar8x32_ps(reinterpret_cast<__m256>(up_to_last),
                                                             reinterpret_cast<__m256i>(indices)));
  }
#endif
  Real twice[2 * kWidth] = {};
  store_bytes(twice, up_to_last);
  return load_bytes<Vector<Real>>(twice + kWidth - count);
}

// One instruction converts all elements; GCC 12 would convert them in two halves.
NORMSCOPE_INLINE Doubles widen_floats(FloatsOfDoubles floats) {
#if defined(__AVX512F__)
  return reinterpret_cast<Doubles>(
      _mm512_maskz_cvtps_pd(kAllDoubles, reinterpret_cast<__m256>(floats)));
#elif defined(__AVX__)
  return reinterpret_cast<Doubles>(_mm256_cvtps_pd(reinterpret_cast<__m128>(floats)));
#else
  return __builtin_convertvector(floats, Doubles);
#endif
}

// Loads elements as float64: kDoubles of them, or one.
template <class Value>
NORMSCOPE_INLINE Value load_wide(const float* from) {
  if constexpr (std::is_same_v<Value, double>)
    return static_cast<double>(*from);
  else
    return widen_floats(load_bytes<FloatsOfDoubles>(from));
}
template <class Value>
NORMSCOPE_INLINE Value load_wide(const double* from) {
  return load_bytes<Value>(from);
}

// The kDoubles elements starting at kFirst.
template <int kFirst, std::size_t... kIndices>
NORMSCOPE_INLINE FloatsOfDoubles part_of(Floats values, std::index_sequence<kIndices...>) {
  return __builtin_shufflevector(values, values, (kIndices + kFirst)...);
}

// A vector of float32, widened to two of float64.
struct WideHalves {
  Doubles of[2] = {};
};
NORMSCOPE_INLINE WideHalves wide_halves(Floats values) {
  constexpr auto kIndices = std::make_index_sequence<kDoubles>{};
  return {{widen_floats(part_of<0>(values, kIndices)),
           widen_floats(part_of<kDoubles>(values, kIndices))}};
}

// Stores a vector of float32 or float64 as float64.
NORMSCOPE_INLINE void store_wide(double* to, Floats values) {
  const WideHalves wide = wide_halves(values);
  for (int half = 0; half < 2; ++half) store_bytes(to + half * kDoubles, wide.of[half]);
}
NORMSCOPE_INLINE void store_wide(double* to, Doubles values) { store_bytes(to, values); }

// Whether a comparison holds for all elements. A comparison sets all bits of an element, or none.
NORMSCOPE_INLINE bool all_set(Words words) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(words),
                                reinterpret_cast<__m512i>(words)) == kAllFloats;
#elif defined(__AVX__)
  return _mm256_movemask_ps(reinterpret_cast<__m256>(words)) == 0xFF;
#elif defined(__SSE2__)
  return _mm_movemask_ps(reinterpret_cast<__m128>(words)) == 0xF;
#else
  bool all = true;
  for (int i = 0; i < kFloats; ++i) all = all && words[i] != 0U;
  return all;
#endif
}

// Whether any element is not zero. NaN counts as not zero.
NORMSCOPE_INLINE bool any_nonzero(Doubles value) {
#if defined(__AVX512F__)
  return _mm512_cmp_pd_mask(reinterpret_cast<__m512d>(value), _mm512_setzero_pd(), _CMP_NEQ_UQ) !=
         0;
#elif defined(__AVX__)
  return _mm256_movemask_pd(_mm256_cmp_pd(reinterpret_cast<__m256d>(value), _mm256_setzero_pd(),
                                          _CMP_NEQ_UQ)) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_pd(_mm_cmpneq_pd(reinterpret_cast<__m128d>(value), _mm_setzero_pd())) != 0;
#else
  bool any = false;
  for (int i = 0; i < kDoubles; ++i) any = any || value[i] != 0.0;
  return any;
#endif
}
NORMSCOPE_INLINE bool any_nonzero(double value) { return value != 0.0; }

// How many elements of an output fill a vector. 16-bit elements take two vectors of the arithmetic.
template <class Element>
inline constexpr int kElementsOf = kVectorBytes / static_cast<int>(sizeof(Element));

// The number of elements from `from` to the next address that is aligned to a vector.
template <class Element>
NORMSCOPE_INLINE std::int64_t elements_before_alignment(const Element* from) {
  const auto address = reinterpret_cast<std::uintptr_t>(from);
  return static_cast<std::int64_t>((0 - address) % kVectorBytes / sizeof(Element));
}

// A store that bypasses the cache. `to` must be aligned to kVectorBytes.
NORMSCOPE_INLINE void stream_words(void* to, Words value) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), reinterpret_cast<__m512i>(value));
#elif defined(__AVX__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(value));
#elif defined(__SSE2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), reinterpret_cast<__m128i>(value));
#else
  store_bytes(to, value);
#endif
}

// Makes streaming stores visible to other threads before any later store.
NORMSCOPE_INLINE void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}
