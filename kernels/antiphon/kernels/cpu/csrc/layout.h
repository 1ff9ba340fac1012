// Rows of a cache turned into what a register tile reads: a lane a key, or a lane a dimension.

#pragma once

#include "fp8.h"
#include "simd.h"

namespace ISA_NS {

// A 32-bit word of a row: two bf16 or one float.
template <class T> static constexpr int WORD_VALUES = 4 / sizeof(T);

INLINE const uint32_t *words_of(const void *row) { return static_cast<const uint32_t *>(row); }

// The word that begins at a value of a row, of K as of T.
template <class T, class K> INLINE uint32_t word_of(const K *row) {
    uint32_t word;
    if constexpr (!IN_BYTES<K>) {
        std::memcpy(&word, row, 4);
    } else if constexpr (std::is_same_v<T, bf16>) {
        word = widened(row[0]) | static_cast<uint32_t>(widened(row[1])) << 16;
    } else {
        word = static_cast<uint32_t>(widened(row[0])) << 16;
    }
    return word;
}

#if ANTIPHON_AVX512

INLINE void store_words(uint32_t *p, I32 a) { _mm512_storeu_si512(p, a.v); }
INLINE F32 as_floats(I32 a) { return {_mm512_castsi512_ps(a.v)}; }
INLINE float lane_0(F32 a) { return _mm512_cvtss_f32(a.v); }

INLINE __m128i four_words(const uint32_t *p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
}
// Four words of each of four rows, a row a quarter.
INLINE I32 quarters(const uint32_t *a, const uint32_t *b, const uint32_t *c, const uint32_t *d) {
    __m512i all = _mm512_castsi128_si512(four_words(a));
    all = _mm512_inserti32x4(all, four_words(b), 1);
    all = _mm512_inserti32x4(all, four_words(c), 2);
    return {_mm512_inserti32x4(all, four_words(d), 3)};
}
INLINE I32 low_words(I32 a, I32 b) { return {_mm512_unpacklo_epi32(a.v, b.v)}; }
INLINE I32 high_words(I32 a, I32 b) { return {_mm512_unpackhi_epi32(a.v, b.v)}; }
INLINE I32 low_doubles(I32 a, I32 b) { return {_mm512_unpacklo_epi64(a.v, b.v)}; }
INLINE I32 high_doubles(I32 a, I32 b) { return {_mm512_unpackhi_epi64(a.v, b.v)}; }

INLINE __m512i load_halves(const bf16 *p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
// Lane i: a[i] below b[i].
INLINE I32 paired(const bf16 *a, const bf16 *b) {
    return {_mm512_or_si512(load_halves(a), _mm512_slli_epi32(load_halves(b), 16))};
}

#else

INLINE void store_words(uint32_t *p, I32 a) {
    auto *halves = reinterpret_cast<__m256i *>(p);
    _mm256_storeu_si256(halves, a.lo);
    _mm256_storeu_si256(halves + 1, a.hi);
}

INLINE F32 as_floats(I32 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
INLINE float lane_0(F32 a) { return _mm256_cvtss_f32(a.lo); }

INLINE __m256i eight_words(const uint32_t *a, const uint32_t *b) {
    return _mm256_loadu2_m128i(
        reinterpret_cast<const __m128i *>(b), reinterpret_cast<const __m128i *>(a));
}
// Four words of each of four rows, a row a quarter.
INLINE I32 quarters(const uint32_t *a, const uint32_t *b, const uint32_t *c, const uint32_t *d) {
    return {eight_words(a, b), eight_words(c, d)};
}
INLINE I32 low_words(I32 a, I32 b) { return BOTH(_mm256_unpacklo_epi32, a, b); }
INLINE I32 high_words(I32 a, I32 b) { return BOTH(_mm256_unpackhi_epi32, a, b); }
INLINE I32 low_doubles(I32 a, I32 b) { return BOTH(_mm256_unpacklo_epi64, a, b); }
INLINE I32 high_doubles(I32 a, I32 b) { return BOTH(_mm256_unpackhi_epi64, a, b); }

INLINE __m256i load_halves(const bf16 *p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
INLINE __m256i eight_paired(const bf16 *a, const bf16 *b) {
    return _mm256_or_si256(load_halves(a), _mm256_slli_epi32(load_halves(b), 16));
}
// Lane i: a[i] below b[i].
INLINE I32 paired(const bf16 *a, const bf16 *b) {
    return {eight_paired(a, b), eight_paired(a + 8, b + 8)};
}

#endif

// acc + the products of the values in each word.
template <class T> INLINE F32 dot_words(F32 acc, I32 a, I32 b) {
    if constexpr (std::is_same_v<T, bf16>) {
        return dot_pairs(acc, a, b);
    } else {
        return fma(as_floats(a), as_floats(b), acc);
    }
}

// Four words of each of four rows of K, as of T.
template <class T, class K> INLINE I32 quarters_of(const K *a, const K *b, const K *c, const K *d) {
    if constexpr (!IN_BYTES<K>) return quarters(words_of(a), words_of(b), words_of(c), words_of(d));
    else if constexpr (std::is_same_v<T, bf16>)
        return widen_codes<K>(byte_halves(a, b), byte_halves(c, d));
    else return as_float_words(widen_sixteen<K>(byte_quarters(a, b, c, d)));
}

// Sixteen rows of `words` words become columns: out[w * stride + r] = rows[r][w].
template <class T, class K>
INLINE void transpose(const K *const *rows, int64_t words, uint32_t *out, int64_t stride) {
    int64_t w = 0;
    for (; w + 4 <= words; w += 4) {
        I32 four[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const int64_t at = w * WORD_VALUES<T>;
            four[i] =
                quarters_of<T>(rows[i] + at, rows[4 + i] + at, rows[8 + i] + at, rows[12 + i] + at);
        }
        const I32 a = low_words(four[0], four[1]), b = low_words(four[2], four[3]);
        const I32 c = high_words(four[0], four[1]), d = high_words(four[2], four[3]);
        store_words(out + w * stride, low_doubles(a, b));
        store_words(out + (w + 1) * stride, high_doubles(a, b));
        store_words(out + (w + 2) * stride, low_doubles(c, d));
        store_words(out + (w + 3) * stride, high_doubles(c, d));
    }
    for (; w < words; ++w)
        for (int r = 0; r < LANES; ++r)
            out[w * stride + r] = word_of<T>(rows[r] + w * WORD_VALUES<T>);
}

// The words of one step over keys: two rows of bf16 side by side, or a row of floats.
INLINE void lay_side_by_side(const bf16 *a, const bf16 *b, int64_t size, uint32_t *out) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store_words(out + i, paired(a + i, b + i));
    for (; i < size; ++i) out[i] = a[i] | static_cast<uint32_t>(b[i]) << 16;
}
INLINE void lay_side_by_side(const float *a, const float *, int64_t size, uint32_t *out) {
    std::memcpy(out, a, size * sizeof(float));
}

// Sixteen of those words, of codes.
template <class T, class K> INLINE I32 words_side_by_side(const K *a, const K *b) {
    const __m128i first = load_codes(a);
    if constexpr (std::is_same_v<T, bf16>) {
        const __m128i second = load_codes(b);
        return widen_codes<K>(_mm_unpacklo_epi8(first, second), _mm_unpackhi_epi8(first, second));
    } else {
        return as_float_words(widen_sixteen<K>(first));
    }
}

// Those words of rows of K, as of T.
template <class T, class K>
INLINE void lay_rows(const K *a, const K *b, int64_t size, uint32_t *out) {
    if constexpr (!IN_BYTES<K>) {
        lay_side_by_side(a, b, size, out);
    } else {
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            store_words(out + i, words_side_by_side<T>(a + i, b + i));
        for (; i < size; ++i) {
            out[i] = widened(a[i]);
            if constexpr (std::is_same_v<T, bf16>) out[i] |= uint32_t{widened(b[i])} << 16;
            else out[i] <<= 16;
        }
    }
}

}  // namespace ISA_NS
