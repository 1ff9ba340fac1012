// Rows of a cache turned into what a register tile reads: a lane a key, or a lane a dimension.

// A 32-bit word of a row: two bf16 or one float.
template <class T> static constexpr int WORD_VALUES = 4 / sizeof(T);

INLINE const uint32_t *words_of(const void *row) { return static_cast<const uint32_t *>(row); }

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
INLINE void transpose(const uint32_t *const *rows, int64_t words, uint32_t *out, int64_t stride) {
    int64_t w = 0;
    for (; w + 4 <= words; w += 4) {
        I32 four[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            four[i] = quarters(rows[i] + w, rows[4 + i] + w, rows[8 + i] + w, rows[12 + i] + w);
        const I32 a = low_words(four[0], four[1]), b = low_words(four[2], four[3]);
        const I32 c = high_words(four[0], four[1]), d = high_words(four[2], four[3]);
        store_words(out + w * stride, low_doubles(a, b));
        store_words(out + (w + 1) * stride, high_doubles(a, b));
        store_words(out + (w + 2) * stride, low_doubles(c, d));
        store_words(out + (w + 3) * stride, high_doubles(c, d));
    }
    for (; w < words; ++w)
        for (int r = 0; r < LANES; ++r) out[w * stride + r] = rows[r][w];
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
