// Weights in groups: codes of a few bits, widened in registers as they are multiplied (packed.h).
//
// Activations meet the values of codes, small numbers that bf16 has exactly. The sum of a group is
// multiplied with the group's scale as it joins the sum of the output, and a minimum with the sum
// of the group's activations: so no weight is rounded, and a weight costs a shift, a lookup and its
// product.

#pragma once

#include "gemm.h"

namespace ISA_NS {

#if ANTIPHON_AVX512

// Scales of sixteen outputs.
INLINE F32 load_halves_as_floats(const void *p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i *>(p)))};
}

// Values of codes, each in one of the 16-bit lanes whose lowest bits are an index.
template <int BITS> struct CodeValues {
    static constexpr int WORDS = BITS == 6 ? 2 : 1;
    __m512i values[WORDS];

    // Indices have five bits at least: values of four bits stand there twice.
    explicit CodeValues(const uint16_t *from) {
        if constexpr (BITS == 4) {
            const __m256i once = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
            values[0] = _mm512_broadcast_i64x4(once);
        } else {
            for (int i = 0; i < WORDS; ++i) values[i] = _mm512_loadu_si512(from + 32 * i);
        }
    }

    __attribute__((always_inline)) I32 of(I32 codes) const {
        if constexpr (BITS == 6) return {_mm512_permutex2var_epi16(values[0], codes.v, values[1])};
        else return {_mm512_permutexvar_epi16(codes.v, values[0])};
    }
};

template <int N> INLINE I32 shifted_right(I32 words) { return {_mm512_srli_epi16(words.v, N)}; }
template <int N> INLINE I32 shifted_left(I32 words) { return {_mm512_slli_epi16(words.v, N)}; }

// The lowest four bits of each 16-bit lane of `low`, the others of `high`.
INLINE I32 nibbles_under(I32 low, I32 high) {
    constexpr int A_IF_C_ELSE_B = 0xe4;
    return {_mm512_ternarylogic_epi32(low.v, high.v, _mm512_set1_epi16(15), A_IF_C_ELSE_B)};
}

INLINE F32 first_of_pairs(I32 pairs) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs.v, 16))};
}
INLINE F32 second_of_pairs(I32 pairs) {
    const __m512i mask = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
    return {_mm512_castsi512_ps(_mm512_and_si512(pairs.v, mask))};
}

#else

INLINE F32 load_halves_as_floats(const void *p) {
    const auto *halves = static_cast<const __m128i *>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}

// Values of codes, each in one of the 16-bit lanes whose lowest bits are an index.
template <int BITS> struct CodeValues {
    static constexpr int TABLES = 1 << (BITS - 4);
    // The lower and the upper bytes of sixteen values each.
    __m256i lower[TABLES], upper[TABLES];

    explicit CodeValues(const uint16_t *from) {
        for (int table = 0; table < TABLES; ++table) {
            alignas(16) uint8_t low[16], high[16];
            for (int i = 0; i < 16; ++i) {
                low[i] = static_cast<uint8_t>(from[16 * table + i]);
                high[i] = static_cast<uint8_t>(from[16 * table + i] >> 8);
            }
            lower[table] = _mm256_broadcastsi128_si256(*reinterpret_cast<const __m128i *>(low));
            upper[table] = _mm256_broadcastsi128_si256(*reinterpret_cast<const __m128i *>(high));
        }
    }

    __attribute__((always_inline)) __m256i of(__m256i codes) const {
        const __m256i index = _mm256_and_si256(codes, _mm256_set1_epi16(15));
        const __m256i both = _mm256_or_si256(index, _mm256_slli_epi16(index, 8));
        __m256i found = in_table(0, both);
        const __m256i upper_bits = _mm256_set1_epi16((1 << BITS) - 16);
        const __m256i table_of = _mm256_and_si256(codes, upper_bits);
        for (int table = 1; table < TABLES; ++table) {
            const __m256i here =
                _mm256_cmpeq_epi16(table_of, _mm256_set1_epi16(static_cast<int16_t>(16 * table)));
            found = _mm256_blendv_epi8(found, in_table(table, both), here);
        }
        return found;
    }
    __attribute__((always_inline)) I32 of(I32 codes) const { return {of(codes.lo), of(codes.hi)}; }

  private:
    __attribute__((always_inline)) __m256i in_table(int table, __m256i both) const {
        const __m256i low = _mm256_shuffle_epi8(lower[table], both);
        const __m256i high = _mm256_shuffle_epi8(upper[table], both);
        return _mm256_blendv_epi8(low, high, _mm256_set1_epi16(static_cast<int16_t>(0xff00)));
    }
};

template <int N> INLINE I32 shifted_right(I32 words) {
    return {_mm256_srli_epi16(words.lo, N), _mm256_srli_epi16(words.hi, N)};
}
template <int N> INLINE I32 shifted_left(I32 words) {
    return {_mm256_slli_epi16(words.lo, N), _mm256_slli_epi16(words.hi, N)};
}

INLINE __m256i nibbles_under(__m256i low, __m256i high) {
    const __m256i mask = _mm256_set1_epi16(15);
    return _mm256_or_si256(_mm256_and_si256(low, mask), _mm256_andnot_si256(mask, high));
}
// The lowest four bits of each 16-bit lane of `low`, the others of `high`.
INLINE I32 nibbles_under(I32 low, I32 high) { return BOTH(nibbles_under, low, high); }

INLINE F32 first_of_pairs(I32 pairs) { return {low_half(pairs.lo), low_half(pairs.hi)}; }
INLINE F32 second_of_pairs(I32 pairs) { return {high_half(pairs.lo), high_half(pairs.hi)}; }

#endif

INLINE F32 load_scales(const char *at, ScaleDtype dtype) {
    switch (dtype) {
        case ScaleDtype::f16: return load_halves_as_floats(at);
        case ScaleDtype::bf16: return load(reinterpret_cast<const bf16 *>(at));
        default: return load(reinterpret_cast<const float *>(at));
    }
}

// acc += R rows by two inputs, whose weights are pairs of bf16.
template <int R>
INLINE void add_pairs(F32 (&acc)[R][2], I32 a, I32 b, const RowPointers<R, bf16> &rows, int64_t k) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const I32 pair = splat_words(rows[r] + k);
        acc[r][0] = dot_pairs(acc[r][0], a, pair);
        acc[r][1] = dot_pairs(acc[r][1], b, pair);
    }
}
template <int R>
INLINE void add_pairs(
    F32 (&acc)[R][2], I32 a, I32 b, const RowPointers<R, float> &rows, int64_t k) {
    const F32 a_first = first_of_pairs(a), b_first = first_of_pairs(b);
    const F32 a_second = second_of_pairs(a), b_second = second_of_pairs(b);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const F32 first = splat(rows[r][k]), second = splat(rows[r][k + 1]);
        acc[r][0] = fma(a_second, second, fma(a_first, first, acc[r][0]));
        acc[r][1] = fma(b_second, second, fma(b_first, first, acc[r][1]));
    }
}

// The codes of pair `P` of a unit, at the lowest bits of each 16-bit lane.
template <int BITS, int P> INLINE I32 codes_of_pair(I32 nibbles, I32 upper) {
    const I32 low = shifted_right<4 * (P % 4)>(nibbles);
    if constexpr (BITS == 4) return low;
    constexpr int AT = (BITS - 4) * P - 4;
    if constexpr (AT >= 0) return nibbles_under(low, shifted_right<(AT >= 0 ? AT : 0)>(upper));
    else return nibbles_under(low, shifted_left<(AT < 0 ? -AT : 0)>(upper));
}

// acc += R rows by one unit of codes.
template <int BITS, int R, class T, int... P>
INLINE void add_unit(
    F32 (&acc)[R][2], const char *codes, const CodeValues<BITS> &values,
    const RowPointers<R, T> &rows, int64_t k, std::integer_sequence<int, P...>) {
    constexpr int64_t WORDS = PANEL * 4;  // bytes of a word of each output
    constexpr int64_t UPPER = sizeof...(P) / 4 * WORDS;
    I32 upper[2] = {};
    if constexpr (BITS > 4) {
        upper[0] = load_int(codes + UPPER);
        upper[1] = load_int(codes + UPPER + WORDS / 2);
    }
    I32 a, b;
    const auto pair = [&](auto p) __attribute__((always_inline)) {
        if constexpr (p() % 4 == 0) {
            a = load_int(codes + p() / 4 * WORDS);
            b = load_int(codes + p() / 4 * WORDS + WORDS / 2);
        }
        add_pairs<R>(
            acc, values.of(codes_of_pair<BITS, p()>(a, upper[0])),
            values.of(codes_of_pair<BITS, p()>(b, upper[1])), rows, k + 2 * p());
    };
    (pair(std::integral_constant<int, P>()), ...);
}

// Inputs that one accumulator takes before it joins the sum of its output: one row by a longer group
// would wait for each product before the next.
static constexpr int64_t CHAIN = 32;

// acc = R rows by the codes of some inputs of a group, `first` to `last`, CHAIN at most.
template <int BITS, int R, class T>
INLINE void sum_chain(
    F32 (&acc)[R][2], const char *codes, const CodeValues<BITS == 8 ? 4 : BITS> &values,
    const RowPointers<R, T> &rows, int64_t first, int64_t last, PrefetchRange &prefetch) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zeros();
    if constexpr (BITS == 8) {
        for (int64_t k = first; k < last; k += 4, codes += 4 * PANEL) {
            look_ahead<R>(codes, 4 * PANEL, k, prefetch);
            add_fours<R>(acc, reinterpret_cast<const int8_t *>(codes), rows, k);
        }
    } else {
        constexpr int UNIT = BITS == 5 ? 32 : BITS == 6 ? 16 : 8;
        constexpr int BYTES = UNIT * BITS * 4;
        for (int64_t k = first; k < last; k += UNIT, codes += BYTES) {
            look_ahead<R>(codes, BYTES, k, prefetch);
            add_unit<BITS, R, T>(
                acc, codes, values, rows, k, std::make_integer_sequence<int, UNIT / 2>());
        }
    }
}

// The sums of a row's groups, for the minimums.
template <class T>
static void sum_row_groups(const T *x, int64_t inputs, int64_t group, float *sums) {
    for (int64_t first = 0; first < inputs; first += group, ++sums) {
        const int64_t last = first + group < inputs ? first + group : inputs;
        F32 total = zeros();
        int64_t k = first;
        for (; k + LANES <= last; k += LANES) total = add(total, load(x + k));
        if (k < last) total = add(total, load(x + k, static_cast<int>(last - k)));
        *sums = sum(total);
    }
}

// Of a block of rows, (rows, groups), in memory of this thread; null without minimums.
template <class T>
static const float *sum_groups(const PackedLinear &linear, const T *x, int64_t rows) {
    if (linear.weights != Weights::grouped || !linear.grouping.minimums) return nullptr;
    static thread_local Scratch scratch;
    const int64_t group = linear.grouping.group, groups = ceil_div(linear.inputs, group);
    auto *sums = static_cast<float *>(scratch.reserve(rows * groups * sizeof(float)));
    for (int64_t r = 0; r < rows; ++r)
        sum_row_groups(x + r * linear.inputs, linear.inputs, group, sums + r * groups);
    return sums;
}

// In place of values that codes of 8 bits do without.
static constexpr uint16_t NO_VALUES[16] = {};

// One register tile, as in gemm.h.
template <int BITS, class T, int R>
static void grouped_tile(const Block<T> &block, int64_t row, void *y, Epilogue epilogue) {
    const PackedLinear &linear = block.linear;
    const Grouping &grouping = linear.grouping;
    const int64_t inputs = linear.inputs, groups = ceil_div(inputs, grouping.group);
    const CodeValues<BITS == 8 ? 4 : BITS> values(BITS == 8 ? NO_VALUES : grouping.values);
    const RowPointers<R, T> rows(block.x + row * inputs, inputs);
    const float *row_sums = grouping.minimums ? block.group_sums + row * groups : nullptr;
    const int64_t size = scales_bytes(grouping);
    const auto *at = static_cast<const char *>(block.weights);
    F32 total[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = zeros();
    for (int64_t g = 0, first = 0; g < groups; ++g, first += grouping.group) {
        const int64_t last = first + grouping.group < inputs ? first + grouping.group : inputs;
        const char *scales = at, *minimums = at + size;
        at += size * (grouping.minimums ? 2 : 1);
        const F32 a = load_scales(scales, grouping.scales);
        const F32 b = load_scales(scales + size / 2, grouping.scales);
        for (int64_t k = first; k < last; k += CHAIN) {
            const int64_t end = k + CHAIN < last ? k + CHAIN : last;
            F32 acc[R][2];
            sum_chain<BITS, R, T>(acc, at, values, rows, k, end, *block.prefetch);
            at += 4 * BITS * (end - k);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                total[r][0] = fma(a, acc[r][0], total[r][0]);
                total[r][1] = fma(b, acc[r][1], total[r][1]);
            }
        }
        if (!grouping.minimums) continue;
        const F32 a_least = load_scales(minimums, grouping.scales);
        const F32 b_least = load_scales(minimums + size / 2, grouping.scales);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const F32 group_sum = splat(row_sums[r * groups + g]);
            total[r][0] = fma(a_least, group_sum, total[r][0]);
            total[r][1] = fma(b_least, group_sum, total[r][1]);
        }
    }
    alignas(64) float sums[R][PANEL];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        store(sums[r], total[r][0]);
        store(sums[r] + LANES, total[r][1]);
    }
    const Finish finish = finish_of<T>(linear, block.panel, epilogue);
    finish(linear, block.panel, block.first + row, R, sums[0], y);
}

template <int BITS, class T> static Tile<T> grouped_tile_of_height(int64_t rows) {
    static constexpr Tile<T> TILES[] = {
        grouped_tile<BITS, T, 1>,  grouped_tile<BITS, T, 2>,  grouped_tile<BITS, T, 3>,
#if ANTIPHON_AVX512
        grouped_tile<BITS, T, 4>,  grouped_tile<BITS, T, 5>,  grouped_tile<BITS, T, 6>,
        grouped_tile<BITS, T, 7>,  grouped_tile<BITS, T, 8>,  grouped_tile<BITS, T, 9>,
        grouped_tile<BITS, T, 10>, grouped_tile<BITS, T, 11>, grouped_tile<BITS, T, 12>,
#endif
    };
    static_assert(sizeof(TILES) / sizeof(TILES[0]) == TILE_ROWS);
    return TILES[rows - 1];
}

template <class T> static Tile<T> grouped_tile_for(int64_t bits, int64_t rows) {
    switch (bits) {
        case 4: return grouped_tile_of_height<4, T>(rows);
        case 5: return grouped_tile_of_height<5, T>(rows);
        case 6: return grouped_tile_of_height<6, T>(rows);
        default: return grouped_tile_of_height<8, T>(rows);
    }
}

INLINE float as_float(uint16_t upper_half) {
    const uint32_t bits = static_cast<uint32_t>(upper_half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// The value of the code of one input, by a lane of the codes of its group.
INLINE float value_of(const Grouping &grouping, const char *codes, int64_t lane, int64_t input) {
    constexpr int64_t WORDS = PANEL * 4;
    const int64_t bits = grouping.bits;
    if (bits == 8) return static_cast<int8_t>(codes[input / 4 * WORDS + lane * 4 + input % 4]);
    const int64_t unit = code_unit(bits), within = input % unit;
    const char *from = codes + input / unit * unit * bits * 4 + lane * 4;
    const auto word = [&](int64_t index) {
        uint32_t found;
        std::memcpy(&found, from + index * WORDS, 4);
        return found;
    };
    const int64_t half = within % 2 * 16, pair = within / 2;
    uint32_t code = word(within / 8) >> (half + 4 * (pair % 4)) & 15;
    if (bits > 4) {
        const uint32_t upper = word(unit / 8) >> (half + (bits - 4) * pair);
        code |= (upper & ((1u << (bits - 4)) - 1)) << 4;
    }
    return as_float(grouping.values[code]);
}

// The weights of one output by its lane of a panel.
template <class T>
static void grouped_row(const PackedLinear &linear, const char *panel, int64_t lane, T *y) {
    const Grouping &grouping = linear.grouping;
    const int64_t size = scales_bytes(grouping), inputs = linear.inputs;
    const auto number = [&](const char *from) {
        alignas(64) float lanes[LANES];
        store(lanes, load_scales(from + lane / LANES * size / 2, grouping.scales));
        return lanes[lane % LANES];
    };
    for (int64_t first = 0; first < inputs; first += grouping.group) {
        const int64_t last = first + grouping.group < inputs ? first + grouping.group : inputs;
        const float scale = number(panel);
        panel += size;
        float minimum = 0.0f;
        if (grouping.minimums) {
            minimum = number(panel);
            panel += size;
        }
        for (int64_t k = first; k < last; ++k) {
            const float value = value_of(grouping, panel, lane, k - first);
            store(y + k, fma(splat(value), splat(scale), splat(minimum)), 1);
        }
        panel += 4 * grouping.bits * (last - first);
    }
}

}  // namespace ISA_NS
