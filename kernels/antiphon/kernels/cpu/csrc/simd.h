// Sixteen float lanes, whatever the machine: one AVX-512 register, or two AVX2 ones.
//
// Everything is a plain function of lanes, so that kernels are written once for all instruction
// sets (isa.h). Float contraction is off: where a product is added without rounding in between, the
// code says `fma`.
//
// A bf16 is a uint16_t in memory, the upper half of the float that it is.

#pragma once

#include "isa.h"

namespace ISA_NS {

static constexpr int LANES = 16;

// GCC's is an enumeration, clang's an int.
using PrefetchHint = decltype(_MM_HINT_T0);

using bf16 = uint16_t;

#if ANTIPHON_AVX512

struct F32 {
    __m512 v;
};
struct I32 {
    __m512i v;
};

#define INLINE static inline __attribute__((always_inline))

INLINE __mmask16 first(int count) { return static_cast<__mmask16>((1u << count) - 1u); }

INLINE F32 zeros() { return {_mm512_setzero_ps()}; }
INLINE F32 splat(float x) { return {_mm512_set1_ps(x)}; }
INLINE F32 load(const float *p) { return {_mm512_loadu_ps(p)}; }
INLINE F32 load(const float *p, int count) { return {_mm512_maskz_loadu_ps(first(count), p)}; }
INLINE void store(float *p, F32 a) { _mm512_storeu_ps(p, a.v); }
INLINE void store(float *p, F32 a, int count) { _mm512_mask_storeu_ps(p, first(count), a.v); }

INLINE F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE F32 div(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Of a and a NaN, `b` is returned: give the value that must survive second.
INLINE F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
INLINE F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
INLINE F32 absolute(F32 a) { return {_mm512_abs_ps(a.v)}; }
// Of magnitudes, as whole numbers, whose order is the same: a NaN is greater than all.
INLINE F32 magnitude_max(F32 a, F32 b) {
    const __m512i bits = _mm512_castps_si512(_mm512_abs_ps(b.v));
    return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a.v), bits))};
}
INLINE F32 round_even(F32 a) { return {_mm512_roundscale_ps(a.v, 8)}; }
// How much more a number is than the next whole one below.
INLINE F32 fraction(F32 a) { return {_mm512_reduce_ps(a.v, 1)}; }

// x * 2^n, n integral, down to zero and up to infinity.
INLINE F32 scale_by_power(F32 x, F32 n) { return {_mm512_scalef_ps(x.v, n.v)}; }
// x * 2^floor(a).
INLINE F32 scale_by_floor(F32 x, F32 a) { return {_mm512_scalef_ps(x.v, a.v)}; }
// Zero where x is below a limit, else y; of a NaN, y.
INLINE F32 zero_below(F32 x, F32 limit, F32 y) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), y.v)};
}

// y where a lane of x has its sign set, else z.
INLINE F32 where_negative(F32 x, F32 y, F32 z) {
    return {_mm512_mask_mov_ps(z.v, _mm512_movepi32_mask(_mm512_castps_si512(x.v)), y.v)};
}

INLINE I32 splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
INLINE I32 load_int(const void *p) { return {_mm512_loadu_si512(p)}; }
INLINE void store_int(void *p, I32 a) { _mm512_storeu_si512(p, a.v); }
INLINE I32 add(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
INLINE I32 sub(I32 a, I32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
INLINE F32 to_float(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
INLINE I32 to_int(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }

INLINE F32 widen(__m256i halves) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
INLINE F32 load(const bf16 *p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
INLINE F32 load(const bf16 *p, int count) {
    return widen(_mm256_maskz_loadu_epi16(first(count), p));
}

#if ANTIPHON_BF16
INLINE __m256i narrow(F32 a) { return (__m256i)_mm512_cvtneps_pbh(a.v); }
#else
// Round to nearest, ties to even; a NaN stays one.
INLINE __m256i narrow(F32 a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
}
#endif
INLINE void store(bf16 *p, F32 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), narrow(a));
}
#if ANTIPHON_BF16
INLINE void store_two(bf16 *p, F32 a, F32 b) {
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v));
}
#endif
INLINE void store(bf16 *p, F32 a, int count) {
    _mm256_mask_storeu_epi16(p, first(count), narrow(a));
}
INLINE F32 rounded_to_bf16(F32 a) { return widen(narrow(a)); }

// Sixteen words of four signed bytes as four numbers a lane.
struct ByteFours {
    F32 of[4];
};
INLINE F32 byte_converted(I32 words, int byte) {
    return to_float({_mm512_srai_epi32(_mm512_slli_epi32(words.v, 24 - 8 * byte), 24)});
}
// A byte with its sign turned, below the exponent of 2^23, is that number and 128 more than the
// byte; they are taken off again.
INLINE F32 byte_turned(I32 words, int byte) {
    constexpr int A_AND_B_XOR_C = 0x6a;
    const __m512i low = byte ? _mm512_srli_epi32(words.v, 8 * byte) : words.v;
    const __m512i mask = _mm512_set1_epi32(0xff), turned = _mm512_set1_epi32(0x4b000080);
    const __m512i more = _mm512_ternarylogic_epi32(low, mask, turned, A_AND_B_XOR_C);
    return {_mm512_sub_ps(_mm512_castsi512_ps(more), _mm512_set1_ps(8388608.0f + 128.0f))};
}
// The same numbers either way: turned in fewer steps, converted on units that products leave free.
template <bool SMALL_M> INLINE ByteFours load_fours(const int8_t *p) {
    const I32 words = load_int(p);
    const auto of = [&](int byte) {
        return SMALL_M ? byte_turned(words, byte) : byte_converted(words, byte);
    };
    return {of(0), of(1), of(2), of(3)};
}
INLINE void store_bytes(int8_t *p, I32 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(a.v));
}

// Numbers that bf16 has as pairs of it.
INLINE I32 bf16_pairs(F32 first, F32 second) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first.v), 16);
    return {_mm512_or_si512(low, _mm512_castps_si512(second.v))};
}

INLINE I32 splat_words(const void *p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return splat_int(word);
}

#if ANTIPHON_BF16
// acc + w.lo * x.lo + w.hi * x.hi, each lane a pair of bf16.
INLINE F32 dot_pairs(F32 acc, I32 w, I32 x) {
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)w.v, (__m512bh)x.v)};
}
#else
INLINE F32 low_half(I32 a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
INLINE F32 high_half(I32 a) {
    const __m512i mask = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
    return {_mm512_castsi512_ps(_mm512_and_si512(a.v, mask))};
}
INLINE F32 dot_pairs(F32 acc, I32 w, I32 x) {
    return fma(high_half(w), high_half(x), fma(low_half(w), low_half(x), acc));
}
#endif

#if ANTIPHON_BF16
// acc + the four products in each lane; w unsigned bytes, x signed ones. Exact.
INLINE I32 dot_bytes(I32 acc, I32 w, I32 x) {
    // GCC 12 copies accumulators through memory around the intrinsic, at twice the time.
    asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(x.v));
    return acc;
}
#else
INLINE I32 dot_bytes(I32 acc, I32 w, I32 x) {
    // Even and odd bytes as 16-bit numbers, whose pairwise products fit 32 bits.
    const __m512i mask = _mm512_set1_epi16(0xff);
    const __m512i w_even = _mm512_and_si512(w.v, mask), w_odd = _mm512_srli_epi16(w.v, 8);
    const __m512i x_even = _mm512_srai_epi16(_mm512_slli_epi16(x.v, 8), 8);
    const __m512i x_odd = _mm512_srai_epi16(x.v, 8);
    const __m512i even = _mm512_madd_epi16(x_even, w_even);
    const __m512i odd = _mm512_madd_epi16(x_odd, w_odd);
    return {_mm512_add_epi32(acc.v, _mm512_add_epi32(even, odd))};
}
#endif

// The sum and the greatest of all lanes, in an order that never changes.
INLINE __m256 upper(F32 a) {
    return _mm256_castsi256_ps(_mm512_extracti64x4_epi64(_mm512_castps_si512(a.v), 1));
}
INLINE __m256 halves_added(F32 a) { return _mm256_add_ps(_mm512_castps512_ps256(a.v), upper(a)); }
INLINE __m256 halves_max(F32 a) { return _mm256_max_ps(_mm512_castps512_ps256(a.v), upper(a)); }

#else  // AVX2

struct F32 {
    __m256 lo, hi;
};
struct I32 {
    __m256i lo, hi;
};

#define INLINE static inline __attribute__((always_inline))
#define BOTH(op, a, b) {op((a).lo, (b).lo), op((a).hi, (b).hi)}

INLINE F32 zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE F32 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F32 load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE F32 load(const float *p, int count) {
    alignas(32) float lanes[LANES] = {};
    std::memcpy(lanes, p, sizeof(float) * count);
    return load(lanes);
}
INLINE void store(float *p, F32 a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
INLINE void store(float *p, F32 a, int count) {
    alignas(32) float lanes[LANES];
    store(lanes, a);
    std::memcpy(p, lanes, sizeof(float) * count);
}

INLINE F32 add(F32 a, F32 b) { return BOTH(_mm256_add_ps, a, b); }
INLINE F32 sub(F32 a, F32 b) { return BOTH(_mm256_sub_ps, a, b); }
INLINE F32 mul(F32 a, F32 b) { return BOTH(_mm256_mul_ps, a, b); }
INLINE F32 div(F32 a, F32 b) { return BOTH(_mm256_div_ps, a, b); }
INLINE F32 fma(F32 a, F32 b, F32 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
// Of a and a NaN, `b` is returned: give the value that must survive second.
INLINE F32 max(F32 a, F32 b) { return BOTH(_mm256_max_ps, a, b); }
INLINE F32 min(F32 a, F32 b) { return BOTH(_mm256_min_ps, a, b); }
INLINE F32 absolute(F32 a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
INLINE __m256 magnitude_max(__m256 a, __m256 b) {
    const __m256i bits = _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), b));
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), bits));
}
// Of magnitudes, as whole numbers, whose order is the same: a NaN is greater than all.
INLINE F32 magnitude_max(F32 a, F32 b) {
    return {magnitude_max(a.lo, b.lo), magnitude_max(a.hi, b.hi)};
}
INLINE F32 round_even(F32 a) { return {_mm256_round_ps(a.lo, 8), _mm256_round_ps(a.hi, 8)}; }
INLINE F32 round_down(F32 a) { return {_mm256_round_ps(a.lo, 9), _mm256_round_ps(a.hi, 9)}; }
// How much more a number is than the next whole one below.
INLINE F32 fraction(F32 a) { return sub(a, round_down(a)); }

INLINE __m256 power(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
INLINE __m256 scale_by_power(__m256 x, __m256 n) {
    // In two steps, since 2^n alone may be out of range where the product is not.
    const __m256i whole = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(whole, 1);
    return _mm256_mul_ps(_mm256_mul_ps(x, power(half)), power(_mm256_sub_epi32(whole, half)));
}
// x * 2^n, n integral, down to zero and up to infinity.
INLINE F32 scale_by_power(F32 x, F32 n) {
    return {scale_by_power(x.lo, n.lo), scale_by_power(x.hi, n.hi)};
}
// x * 2^floor(a).
INLINE F32 scale_by_floor(F32 x, F32 a) { return scale_by_power(x, round_down(a)); }
// Zero where x is below a limit, else y; of a NaN, y.
INLINE F32 zero_below(F32 x, F32 limit, F32 y) {
    return {
        _mm256_and_ps(_mm256_cmp_ps(x.lo, limit.lo, _CMP_NLT_UQ), y.lo),
        _mm256_and_ps(_mm256_cmp_ps(x.hi, limit.hi, _CMP_NLT_UQ), y.hi)};
}

// y where a lane of x has its sign set, else z.
INLINE F32 where_negative(F32 x, F32 y, F32 z) {
    return {_mm256_blendv_ps(z.lo, y.lo, x.lo), _mm256_blendv_ps(z.hi, y.hi, x.hi)};
}

INLINE I32 splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE I32 load_int(const void *p) {
    const auto *words = static_cast<const __m256i *>(p);
    return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
}
INLINE void store_int(void *p, I32 a) {
    auto *words = static_cast<__m256i *>(p);
    _mm256_storeu_si256(words, a.lo);
    _mm256_storeu_si256(words + 1, a.hi);
}
INLINE I32 add(I32 a, I32 b) { return BOTH(_mm256_add_epi32, a, b); }
INLINE I32 sub(I32 a, I32 b) { return BOTH(_mm256_sub_epi32, a, b); }
INLINE F32 to_float(I32 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
INLINE I32 to_int(F32 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }

INLINE __m256 widen(__m128i halves) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
INLINE F32 load(const bf16 *p) {
    const auto *halves = reinterpret_cast<const __m128i *>(p);
    return {widen(_mm_loadu_si128(halves)), widen(_mm_loadu_si128(halves + 1))};
}
INLINE F32 load(const bf16 *p, int count) {
    alignas(32) bf16 lanes[LANES] = {};
    std::memcpy(lanes, p, sizeof(bf16) * count);
    return load(lanes);
}
// Round to nearest, ties to even; a NaN stays one.
INLINE __m256i narrow(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}
INLINE void store(bf16 *p, F32 a) {
    const __m256i packed = _mm256_packus_epi32(narrow(a.lo), narrow(a.hi));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
INLINE void store(bf16 *p, F32 a, int count) {
    alignas(32) bf16 lanes[LANES];
    store(lanes, a);
    std::memcpy(p, lanes, sizeof(bf16) * count);
}
INLINE __m256 rounded_to_bf16(__m256 a) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(narrow(a), 16));
}
INLINE F32 rounded_to_bf16(F32 a) { return {rounded_to_bf16(a.lo), rounded_to_bf16(a.hi)}; }

// Sixteen words of four signed bytes as four numbers a lane.
struct ByteFours {
    F32 of[4];
};
INLINE __m256 byte_of(__m256i words, int byte) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 24 - 8 * byte), 24));
}
INLINE F32 byte_of(I32 words, int byte) {
    return {byte_of(words.lo, byte), byte_of(words.hi, byte)};
}
template <bool> INLINE ByteFours load_fours(const int8_t *p) {
    const I32 words = load_int(p);
    return {byte_of(words, 0), byte_of(words, 1), byte_of(words, 2), byte_of(words, 3)};
}
INLINE void store_bytes(int8_t *p, I32 a) {
    alignas(32) int32_t lanes[LANES];
    _mm256_store_si256(reinterpret_cast<__m256i *>(lanes), a.lo);
    _mm256_store_si256(reinterpret_cast<__m256i *>(lanes) + 1, a.hi);
    for (int i = 0; i < LANES; ++i) p[i] = static_cast<int8_t>(lanes[i]);
}

INLINE I32 splat_words(const void *p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return splat_int(word);
}

INLINE __m256 low_half(__m256i a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
INLINE __m256 high_half(__m256i a) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
    return _mm256_castsi256_ps(_mm256_and_si256(a, mask));
}
INLINE __m256i bf16_pairs(__m256 first, __m256 second) {
    const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(first), 16);
    return _mm256_or_si256(low, _mm256_castps_si256(second));
}
// Numbers that bf16 has as pairs of it.
INLINE I32 bf16_pairs(F32 first, F32 second) {
    return {bf16_pairs(first.lo, second.lo), bf16_pairs(first.hi, second.hi)};
}
INLINE __m256 dot_pairs(__m256 acc, __m256i w, __m256i x) {
    return _mm256_fmadd_ps(
        high_half(w), high_half(x), _mm256_fmadd_ps(low_half(w), low_half(x), acc));
}
// acc + w.lo * x.lo + w.hi * x.hi, each lane a pair of bf16.
INLINE F32 dot_pairs(F32 acc, I32 w, I32 x) {
    return {dot_pairs(acc.lo, w.lo, x.lo), dot_pairs(acc.hi, w.hi, x.hi)};
}

INLINE __m256i dot_bytes(__m256i acc, __m256i w, __m256i x) {
    // Even and odd bytes as 16-bit numbers, whose pairwise products fit 32 bits.
    const __m256i mask = _mm256_set1_epi16(0xff);
    const __m256i w_even = _mm256_and_si256(w, mask), w_odd = _mm256_srli_epi16(w, 8);
    const __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8);
    const __m256i x_odd = _mm256_srai_epi16(x, 8);
    const __m256i even = _mm256_madd_epi16(x_even, w_even);
    const __m256i odd = _mm256_madd_epi16(x_odd, w_odd);
    return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
// acc + the four products in each lane; w unsigned bytes, x signed ones. Exact.
INLINE I32 dot_bytes(I32 acc, I32 w, I32 x) {
    return {dot_bytes(acc.lo, w.lo, x.lo), dot_bytes(acc.hi, w.hi, x.hi)};
}

INLINE __m256 halves_added(F32 a) { return _mm256_add_ps(a.lo, a.hi); }
INLINE __m256 halves_max(F32 a) { return _mm256_max_ps(a.lo, a.hi); }

#endif

// What follows is the same on every machine.

// The sum of all lanes, in an order that never changes.
INLINE float sum(F32 a) {
    const __m256 eight = halves_added(a);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}

INLINE int32_t sum(I32 a) {
    alignas(64) int32_t lanes[LANES];
    store_int(lanes, a);
    int32_t total = 0;
    for (const int32_t lane : lanes) total += lane;
    return total;
}

// The greatest of all lanes' magnitudes; a NaN is greater than all.
INLINE float max_magnitude(F32 a) {
    alignas(64) float lanes[LANES];
    store(lanes, a);
    float top = 0.0f;
    for (const float lane : lanes) top = lane > top || lane != lane ? lane : top;
    return top;
}

// The greatest of all lanes, none of which is a NaN.
INLINE float reduce_max(F32 a) {
    const __m256 eight = halves_max(a);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

// Lane r is what the lanes of rows[r] come to, for r < count, in the order of `one`; `pair` makes it of
// two halves. Beyond `count` it is anything.
template <class One, class Pair>
INLINE F32 reduce_rows(const F32 *rows, int count, One &&one, [[maybe_unused]] Pair &&pair) {
#if ANTIPHON_AVX512
    if (count == LANES) {
        const auto fold = [&](__m512 a, __m512 b) { return pair(F32{a}, F32{b}).v; };
        __m512 fours[4];
        for (int i = 0; i < 4; ++i) {
            __m512 twos[2];
            for (int j = 0; j < 2; ++j) {
                const __m512 a = rows[i + 8 * j].v, b = rows[i + 8 * j + 4].v;
                twos[j] = fold(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
            }
            fours[i] = fold(
                _mm512_shuffle_f32x4(twos[0], twos[1], 0x88),
                _mm512_shuffle_f32x4(twos[0], twos[1], 0xdd));
        }
        __m512 eights[2];
        for (int i = 0; i < 2; ++i) {
            const __m512d a = _mm512_castps_pd(fours[2 * i]),
                          b = _mm512_castps_pd(fours[2 * i + 1]);
            eights[i] = fold(
                _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
        }
        return {fold(
            _mm512_shuffle_ps(eights[0], eights[1], 0x88),
            _mm512_shuffle_ps(eights[0], eights[1], 0xdd))};
    }
#endif
    alignas(64) float lanes[LANES] = {};
    for (int r = 0; r < count; ++r) lanes[r] = one(rows[r]);
    return load(lanes);
}
INLINE F32 reduce_max(const F32 *rows, int count) {
    return reduce_rows(
        rows, count, [](F32 a) { return reduce_max(a); }, [](F32 a, F32 b) { return max(a, b); });
}
INLINE F32 sums(const F32 *rows, int count) {
    return reduce_rows(
        rows, count, [](F32 a) { return sum(a); }, [](F32 a, F32 b) { return add(a, b); });
}

// e^x within 2 units in the last place: zero below -104, infinite above 88.8, NaN for NaN.
// Source: the range reduction and polynomial of expf in S. L. Moshier's Cephes library.
INLINE F32 exponential(F32 x) {
    x = min(splat(89.0f), max(splat(-104.0f), x));
    const F32 n = round_even(mul(x, splat(1.44269504088896341f)));
    const F32 r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
    F32 p = fma(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    return scale_by_power(add(fma(p, mul(r, r), r), splat(1.0f)), n);
}

#if !ANTIPHON_BF16
INLINE void store_two(bf16 *p, F32 a, F32 b) {
    store(p, a);
    store(p + LANES, b);
}
#endif
INLINE void store_two(float *p, F32 a, F32 b) {
    store(p, a);
    store(p + LANES, b);
}

// A float as the number format T keeps it.
template <class T> INLINE F32 rounded(F32 a) {
    if constexpr (std::is_same_v<T, bf16>) return rounded_to_bf16(a);
    else return a;
}

}  // namespace ISA_NS
