// Words of a cache as what a register tile reads (kv_layout.h).

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

// The bits of one number of K, as of T.
template <class T, class K> INLINE uint32_t number_bits(const K *p) {
    if constexpr (sizeof(T) == sizeof(float)) return word_of<T>(p);
    else if constexpr (IN_BYTES<K>) return widened(*p);
    else return *p;
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

// Sixteen rows of `words` words become columns: out[w * stride + r] = rows[r][w].
template <class T>
INLINE void transpose(const T *const *rows, int64_t words, uint32_t *out, int64_t stride) {
    static_assert(WORD_VALUES<T> == 1);
    const auto at = [&](int row, int64_t word) { return words_of(rows[row] + word); };
    int64_t w = 0;
    for (; w + 4 <= words; w += 4) {
        I32 four[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            four[i] = quarters(at(i, w), at(4 + i, w), at(8 + i, w), at(12 + i, w));
        const I32 a = low_words(four[0], four[1]), b = low_words(four[2], four[3]);
        const I32 c = high_words(four[0], four[1]), d = high_words(four[2], four[3]);
        store_words(out + w * stride, low_doubles(a, b));
        store_words(out + (w + 1) * stride, high_doubles(a, b));
        store_words(out + (w + 2) * stride, low_doubles(c, d));
        store_words(out + (w + 3) * stride, high_doubles(c, d));
    }
    for (; w < words; ++w)
        for (int r = 0; r < LANES; ++r) out[w * stride + r] = *at(r, w);
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

// Two rows of sixteen words of K, as of T.
template <class T, class K> INLINE std::array<I32, 2> words_as(const K *a, const K *b) {
    if constexpr (!IN_BYTES<K>) return {{load_int(a), load_int(b)}};
    else if constexpr (std::is_same_v<T, bf16>)
        return widen_codes<K>(load_code_pairs(a), load_code_pairs(b));
    else
        return {
            {as_float_words(widen_sixteen<K>(load_codes(a))),
             as_float_words(widen_sixteen<K>(load_codes(b)))}};
}

// Sixteen keys: `words` words of each, of K and `step` numbers apart, as words of T.
template <class T, class K>
INLINE void copy_panel(const K *from, int64_t step, int64_t words, uint32_t *to, int64_t stride) {
    for (int64_t w = 0; w < words; w += 2, from += 2 * step, to += 2 * stride) {
        const bool both = w + 1 < words;
        const auto [first, second] = words_as<T>(from, both ? from + step : from);
        store_words(to, first);
        if (both) store_words(to + stride, second);
    }
}

// Words of K that lie one after the other, as words of T.
template <class T, class K> INLINE void copy_words(const K *from, int64_t words, uint32_t *to) {
    constexpr int64_t VALUES = WORD_VALUES<T>;
    int64_t w = 0;
    for (; w + 2 * LANES <= words; w += 2 * LANES) {
        const auto [first, second] = words_as<T>(from + w * VALUES, from + (w + LANES) * VALUES);
        store_words(to + w, first);
        store_words(to + w + LANES, second);
    }
    for (; w < words; ++w) to[w] = word_of<T>(from + w * VALUES);
}

}  // namespace ISA_NS
