// Numbers of eight bits, as keys and values may be kept: a sign, a magnitude, and what is special.
//
// A magnitude is an exponent above a fraction, so that shifted into the place of bf16's it is one of
// bf16's but for the exponent's bias; only those below the least normal number need a table. Each is
// exactly a bf16. Floats become codes rounded to nearest, ties to even, and none beyond the greatest
// number: what is greater, infinities too, becomes that. A NaN stays one.
//
// Source of the formats: Micikevicius et al. 2022, arXiv:2209.05433.

#pragma once

#include "simd.h"

namespace ISA_NS {

struct E4m3 {
    uint8_t code;

    static constexpr int FRACTION = 3, BIAS = 7;
    static constexpr int SPECIAL = 0x7f;    // from this magnitude on: NaN
    static constexpr int INVALID = 0x7fc0;  // what makes the bits of one that is special so
    static constexpr float GREATEST = 448.0f;
    // Magnitudes below the least normal number as bf16: the lower byte of each, then the upper ones.
    alignas(16) static constexpr uint8_t SMALL_BYTES[16] = {0x00, 0x00, 0x80, 0xc0, 0x00, 0x20,
                                                            0x40, 0x60, 0x00, 0x3b, 0x3b, 0x3b,
                                                            0x3c, 0x3c, 0x3c, 0x3c};
};

struct E5m2 {
    uint8_t code;

    static constexpr int FRACTION = 2, BIAS = 15;
    static constexpr int SPECIAL = 0x7c;  // infinity, then NaN
    static constexpr int INVALID = 0x7f80;
    static constexpr float GREATEST = 57344.0f;
    alignas(16) static constexpr uint8_t SMALL_BYTES[16] = {0x00, 0x80, 0x00, 0x40, 0,    0,
                                                            0,    0,    0x00, 0x37, 0x38, 0x38};
};

template <class K> static constexpr bool IN_BYTES = sizeof(K) == 1;

// Magnitudes below this are multiples of the least one.
template <class K> static constexpr int SMALL = 1 << K::FRACTION;
// From a magnitude's place in a bf16 or a float to its own, and the difference of the biases there.
template <class K> static constexpr int BF16_SHIFT = 7 - K::FRACTION;
template <class K> static constexpr int BF16_BIAS = (127 - K::BIAS) << 7;
template <class K> static constexpr int FLOAT_SHIFT = 23 - K::FRACTION;
template <class K> static constexpr int CODE_BIAS = (127 - K::BIAS) << K::FRACTION;
template <class K> static constexpr float LEAST = 2.0f / (1ull << (K::BIAS + K::FRACTION));
template <class K> static constexpr float LEAST_NORMAL = 2.0f / (1ull << K::BIAS);

template <class K> static constexpr bf16 widened(K kept) {
    const int size = kept.code & 0x7f, sign = (kept.code & 0x80) << 8;
    int bits = BF16_BIAS<K> + (size << BF16_SHIFT<K>);
    if (size >= K::SPECIAL) bits |= K::INVALID;
    if (size < SMALL<K>) bits = K::SMALL_BYTES[8 + size] << 8 | K::SMALL_BYTES[size];
    return static_cast<bf16>(bits | sign);
}

template <class K> INLINE __m128i small_ones() {
    return _mm_load_si128(reinterpret_cast<const __m128i *>(K::SMALL_BYTES));
}

INLINE __m128i load_codes(const void *p) {
    return _mm_loadu_si128(static_cast<const __m128i *>(p));
}
INLINE __m256i load_code_pairs(const void *p) {
    return _mm256_loadu_si256(static_cast<const __m256i *>(p));
}
// Sixteen codes as bf16.
template <class K> INLINE __m256i widen_sixteen(__m128i codes) {
    const __m256i table = _mm256_broadcastsi128_si256(small_ones<K>());
    const __m256i x = _mm256_cvtepu8_epi16(codes);
    const __m256i size = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
    const __m256i both = _mm256_or_si256(size, _mm256_slli_epi16(size, 8));
    const __m256i small =
        _mm256_shuffle_epi8(table, _mm256_add_epi16(both, _mm256_set1_epi16(0x0800)));
    __m256i bits =
        _mm256_add_epi16(_mm256_slli_epi16(size, BF16_SHIFT<K>), _mm256_set1_epi16(BF16_BIAS<K>));
    bits = _mm256_blendv_epi8(bits, small, _mm256_cmpgt_epi16(_mm256_set1_epi16(SMALL<K>), size));
    const __m256i special = _mm256_cmpgt_epi16(size, _mm256_set1_epi16(K::SPECIAL - 1));
    bits = _mm256_or_si256(bits, _mm256_and_si256(special, _mm256_set1_epi16(K::INVALID)));
    const __m256i sign =
        _mm256_and_si256(_mm256_slli_epi16(x, 8), _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
    return _mm256_or_si256(bits, sign);
}

#if ANTIPHON_AVX512

// Thirty-two codes as bf16.
template <class K> INLINE I32 widen_codes(__m256i codes) {
    const __m512i table = _mm512_broadcast_i32x4(small_ones<K>());
    const __m512i x = _mm512_cvtepu8_epi16(codes);
    const __m512i size = _mm512_and_si512(x, _mm512_set1_epi16(0x7f));
    const __m512i both = _mm512_or_si512(size, _mm512_slli_epi16(size, 8));
    const __m512i small =
        _mm512_shuffle_epi8(table, _mm512_add_epi16(both, _mm512_set1_epi16(0x0800)));
    __m512i bits =
        _mm512_add_epi16(_mm512_slli_epi16(size, BF16_SHIFT<K>), _mm512_set1_epi16(BF16_BIAS<K>));
    const __mmask32 is_small = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(SMALL<K>));
    bits = _mm512_mask_mov_epi16(bits, is_small, small);
    const __mmask32 special = _mm512_cmpge_epu16_mask(size, _mm512_set1_epi16(K::SPECIAL));
    const __m512i invalid = _mm512_maskz_mov_epi16(special, _mm512_set1_epi16(K::INVALID));
    bits = _mm512_or_si512(bits, invalid);
    const __m512i upper = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
    // bits | (x << 8 & upper)
    return {_mm512_ternarylogic_epi32(bits, _mm512_slli_epi16(x, 8), upper, 0xf8)};
}

#if ANTIPHON_BF16
// The upper or the lower bytes of what each magnitude is as bf16.
template <class K> struct WideBytes {
    alignas(64) uint8_t upper[128], lower[128];

    constexpr WideBytes() {
        for (int size = 0; size < 128; ++size) {
            const bf16 wide = widened(K{static_cast<uint8_t>(size)});
            upper[size] = static_cast<uint8_t>(wide >> 8);
            lower[size] = static_cast<uint8_t>(wide);
        }
    }
};
template <class K> static constexpr WideBytes<K> WIDE_BYTES;

// Twice thirty-two codes as bf16: a magnitude is looked up, a half of its bits at a time.
template <class K> INLINE std::array<I32, 2> widen_codes(__m256i first, __m256i second) {
    // Interleaving bytes goes by lanes of sixteen: those of the first come before, a half a lane.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    const __m512i codes = _mm512_permutexvar_epi64(order, both);
    const auto look_up = [&](const uint8_t *bytes) {
        return _mm512_permutex2var_epi8(
            _mm512_load_si512(bytes), codes, _mm512_load_si512(bytes + 64));
    };
    const __m512i sign = _mm512_set1_epi8(static_cast<int8_t>(0x80));
    // upper | (codes & sign)
    const __m512i upper =
        _mm512_ternarylogic_epi32(look_up(WIDE_BYTES<K>.upper), codes, sign, 0xf8);
    const __m512i lower = look_up(WIDE_BYTES<K>.lower);
    return {{{_mm512_unpacklo_epi8(lower, upper)}, {_mm512_unpackhi_epi8(lower, upper)}}};
}
#endif

// Sixteen bf16 as floats.
INLINE I32 as_float_words(__m256i halves) {
    return {_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)};
}

template <class K> INLINE __m128i codes_of(F32 a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512 size = _mm512_min_ps(_mm512_abs_ps(a.v), _mm512_set1_ps(K::GREATEST));
    const __m512i whole = _mm512_castps_si512(size);
    const __m512i odd =
        _mm512_and_si512(_mm512_srli_epi32(whole, FLOAT_SHIFT<K>), _mm512_set1_epi32(1));
    const __m512i half = _mm512_set1_epi32((1 << (FLOAT_SHIFT<K> - 1)) - 1);
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(whole, half), odd);
    __m512i code = _mm512_sub_epi32(
        _mm512_srli_epi32(rounded, FLOAT_SHIFT<K>), _mm512_set1_epi32(CODE_BIAS<K>));
    const __mmask16 small = _mm512_cmp_ps_mask(size, _mm512_set1_ps(LEAST_NORMAL<K>), _CMP_LT_OQ);
    const __m512 steps = _mm512_mul_ps(size, _mm512_set1_ps(1.0f / LEAST<K>));
    code = _mm512_mask_mov_epi32(code, small, _mm512_cvtps_epi32(steps));
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    code = _mm512_mask_mov_epi32(code, nan, _mm512_set1_epi32(0x7f));
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
    return _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign));
}

#else

template <class K> INLINE I32 widen_codes(__m256i codes) {
    return {
        widen_sixteen<K>(_mm256_castsi256_si128(codes)),
        widen_sixteen<K>(_mm256_extracti128_si256(codes, 1))};
}
INLINE __m256i eight_float_words(__m128i halves) {
    return _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
}
INLINE I32 as_float_words(__m256i halves) {
    return {
        eight_float_words(_mm256_castsi256_si128(halves)),
        eight_float_words(_mm256_extracti128_si256(halves, 1))};
}

// Eight codes, each in the lowest byte of 32 bits.
template <class K> INLINE __m256i eight_codes(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256 plain = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
    const __m256 size = _mm256_min_ps(plain, _mm256_set1_ps(K::GREATEST));
    const __m256i whole = _mm256_castps_si256(size);
    const __m256i odd =
        _mm256_and_si256(_mm256_srli_epi32(whole, FLOAT_SHIFT<K>), _mm256_set1_epi32(1));
    const __m256i half = _mm256_set1_epi32((1 << (FLOAT_SHIFT<K> - 1)) - 1);
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(whole, half), odd);
    __m256i code = _mm256_sub_epi32(
        _mm256_srli_epi32(rounded, FLOAT_SHIFT<K>), _mm256_set1_epi32(CODE_BIAS<K>));
    const __m256 small = _mm256_cmp_ps(size, _mm256_set1_ps(LEAST_NORMAL<K>), _CMP_LT_OQ);
    const __m256i steps = _mm256_cvtps_epi32(_mm256_mul_ps(size, _mm256_set1_ps(1.0f / LEAST<K>)));
    code = _mm256_blendv_epi8(code, steps, _mm256_castps_si256(small));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    code = _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7f), nan);
    return _mm256_or_si256(
        code, _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80)));
}
template <class K> INLINE __m128i codes_of(F32 a) {
    const __m256i words = _mm256_permute4x64_epi64(
        _mm256_packus_epi32(eight_codes<K>(a.lo), eight_codes<K>(a.hi)), 0xd8);
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

#endif

#if !ANTIPHON_BF16
template <class K> INLINE std::array<I32, 2> widen_codes(__m256i first, __m256i second) {
    return {{widen_codes<K>(first), widen_codes<K>(second)}};
}
#endif

template <class K> INLINE void store_codes(K *p, F32 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), codes_of<K>(a));
}
template <class K> INLINE void store_codes(K *p, F32 a, int count) {
    alignas(16) K codes[LANES];
    store_codes(codes, a);
    std::memcpy(p, codes, count);
}

}  // namespace ISA_NS
