// Packed linear: y = x W^T + bias, float32 sums, the same bits for every number of rows.
//
// Weights are cut into panels of 32 outputs. An output is summed in one accumulator, inputs
// ascending, whatever the number of rows and wherever chunks begin: independent outputs keep the
// pipelines busy, so no sum needs to be split. A register tile is up to TILE_ROWS rows by one
// panel; rows are read where they lie, one broadcast a step, so nothing of x is packed.
// chunks.h shares the panels out.

#pragma once

#include "activation.h"
#include "fp8.h"
#include "simd.h"
#include "team.h"

namespace ISA_NS {

static constexpr int PANEL = 2 * LANES;
static constexpr int TILE_ROWS = ANTIPHON_AVX512 ? 12 : 3;

// How often the panel that comes next is asked for: after so many inputs. Beside products of bf16 a
// line or two in every step: in a burst after every 16 inputs, 8 and 16 rows took 10 to 14 % longer
// on a Zen 5, 32 rows 5 % and 64 rows 2 to 4 %. Products of bytes were as fast or faster with
// bursts.
static constexpr int64_t PREFETCH_INPUTS = 16, PREFETCH_INPUTS_BF16 = 2;

static constexpr int64_t prefetch_inputs(Weights weights) {
    return weights == Weights::bf16 ? PREFETCH_INPUTS_BF16 : PREFETCH_INPUTS;
}

INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

INLINE int64_t panels_of(const PackedLinear &linear) {
    return linear.halves ? ceil_div(linear.outputs / 2, LANES) : ceil_div(linear.outputs, PANEL);
}

INLINE int64_t panel_bytes(const PackedLinear &linear) {
    switch (linear.weights) {
        case Weights::bf16: return ceil_div(linear.inputs, 2) * 2 * PANEL * 2;
        case Weights::f32: return linear.inputs * PANEL * 4;
        case Weights::grouped: return grouped_panel_bytes(linear.grouping, linear.inputs);
        default: return ceil_div(linear.inputs, 4) * 4 * PANEL;
    }
}

// Rows of 8-bit activations begin where whole vectors can be written.
INLINE int64_t byte_stride(int64_t inputs) { return ceil_div(inputs, LANES) * LANES; }

// Where R rows begin; three share a base, so that their addresses fit the registers.
template <int R, class X> struct RowPointers {
    const X *base[(R + 2) / 3];
    int64_t stride;
    RowPointers(const X *x, int64_t stride_) : stride(stride_) {
        for (int i = 0; i < (R + 2) / 3; ++i) base[i] = x + 3 * i * stride;
    }
    const X *operator[](int r) const { return base[r / 3] + (r % 3) * stride; }
};

// Ask the memory while R rows meet a panel: for what lies a little further on in it, since the
// processor's own look-ahead is short beside work, and for the panel that comes next. The latter in
// high tiles alone: few rows wait for the memory, which then has nothing to give away. They are
// mostly all that there are, and meet each panel once: what is asked for them passes by the caches
// behind the first, which keep what else a step needs.
template <int R, int64_t EVERY = PREFETCH_INPUTS>
INLINE void look_ahead(const void *panel, int bytes, int64_t input, PrefetchRange &prefetch) {
    constexpr int AHEAD = 4096;
    constexpr bool HIGH = 2 * R >= TILE_ROWS;
    for (int line = 0; line < bytes; line += 64)
        _mm_prefetch(
            static_cast<const char *>(panel) + AHEAD + line, HIGH ? _MM_HINT_T0 : _MM_HINT_NTA);
    if (HIGH && input % EVERY == 0) prefetch.step();
}

// acc = R rows of bf16 by a panel of pairs.
template <int R>
INLINE void sum_products(
    F32 (&acc)[R][2], const bf16 *panel, int64_t inputs, const bf16 *x, PrefetchRange &prefetch) {
    const RowPointers<R, bf16> rows(x, inputs);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zeros();
    int64_t k = 0;
    for (; k + 1 < inputs; k += 2, panel += 2 * PANEL) {
        look_ahead<R, PREFETCH_INPUTS_BF16>(panel, 2 * PANEL * sizeof(bf16), k, prefetch);
        const I32 a = load_int(panel), b = load_int(panel + PANEL);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const I32 pair = splat_words(rows[r] + k);
            acc[r][0] = dot_pairs(acc[r][0], a, pair);
            acc[r][1] = dot_pairs(acc[r][1], b, pair);
        }
    }
    if (k < inputs) {
        const I32 a = load_int(panel), b = load_int(panel + PANEL);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const I32 last = splat_int(rows[r][k]);
            acc[r][0] = dot_pairs(acc[r][0], a, last);
            acc[r][1] = dot_pairs(acc[r][1], b, last);
        }
    }
}

// acc = R rows of floats by a panel of floats.
template <int R>
INLINE void sum_products(
    F32 (&acc)[R][2], const float *panel, int64_t inputs, const float *x, PrefetchRange &prefetch) {
    const RowPointers<R, float> rows(x, inputs);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zeros();
    for (int64_t k = 0; k < inputs; ++k, panel += PANEL) {
        look_ahead<R>(panel, PANEL * sizeof(float), k, prefetch);
        const F32 a = load(panel), b = load(panel + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const F32 each = splat(rows[r][k]);
            acc[r][0] = fma(a, each, acc[r][0]);
            acc[r][1] = fma(b, each, acc[r][1]);
        }
    }
}

// acc += R rows by four inputs of a panel of bytes, scales to come; rows are bf16, or floats.
template <int R>
INLINE void add_fours(
    F32 (&acc)[R][2], const int8_t *panel, const RowPointers<R, bf16> &rows, int64_t k) {
    constexpr bool SMALL_M = 2 * R < TILE_ROWS;
    const ByteFours a = load_fours<SMALL_M>(panel), b = load_fours<SMALL_M>(panel + 2 * PANEL);
    for (int half = 0; half < 4; half += 2) {
        const I32 a_pairs = bf16_pairs(a.of[half], a.of[half + 1]);
        const I32 b_pairs = bf16_pairs(b.of[half], b.of[half + 1]);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const I32 pair = splat_words(rows[r] + k + half);
            acc[r][0] = dot_pairs(acc[r][0], a_pairs, pair);
            acc[r][1] = dot_pairs(acc[r][1], b_pairs, pair);
        }
    }
}
template <int R>
INLINE void add_fours(
    F32 (&acc)[R][2], const int8_t *panel, const RowPointers<R, float> &rows, int64_t k) {
    constexpr bool SMALL_M = 2 * R < TILE_ROWS;
    const ByteFours a = load_fours<SMALL_M>(panel), b = load_fours<SMALL_M>(panel + 2 * PANEL);
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const F32 each = splat(rows[r][k + i]);
            acc[r][0] = fma(a.of[i], each, acc[r][0]);
            acc[r][1] = fma(b.of[i], each, acc[r][1]);
        }
    }
}

// acc = R rows by a panel of fours of bytes, scales to come.
template <int R, class T>
INLINE void sum_products(
    F32 (&acc)[R][2], const int8_t *panel, int64_t inputs, const T *x, PrefetchRange &prefetch) {
    const RowPointers<R, T> rows(x, inputs);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zeros();
    int64_t k = 0;
    for (; k + 3 < inputs; k += 4, panel += 4 * PANEL) {
        look_ahead<R>(panel, 4 * PANEL, k, prefetch);
        add_fours<R>(acc, panel, rows, k);
    }
    if (k < inputs) {
        T last[R][4] = {};
        for (int r = 0; r < R; ++r) std::memcpy(last[r], rows[r] + k, (inputs - k) * sizeof(T));
        add_fours<R>(acc, panel, RowPointers<R, T>(last[0], 4), 0);
    }
}

// A block of rows cut to bytes: x ~ q * scale of the row.
struct QuantizedRows {
    const int8_t *q;  // rows byte_stride apart, padded with zeros
    const float *scales;
    const int32_t *excess;  // 128 times the sum of q: weights are stored 128 too large
};

template <class T>
INLINE void quantize_activations(
    const T *x, int64_t inputs, int8_t *q, float *scale, int32_t *excess) {
    const int64_t full = inputs / LANES * LANES;
    const int rest = static_cast<int>(inputs - full);
    F32 top = zeros();
    for (int64_t k = 0; k < full; k += LANES) top = magnitude_max(top, load(x + k));
    if (rest) top = magnitude_max(top, load(x + full, rest));
    *scale = max_magnitude(top) / 127.0f;
    // So small a row is zero; a NaN or infinity is in its scale, and so in all that comes of it.
    const F32 inverse = splat(*scale > 1e-30f ? 1.0f / *scale : 0.0f);
    I32 total = splat_int(0);
    const auto cut = [&](F32 part, int8_t *to) {
        const I32 steps = to_int(mul(part, inverse));
        total = add(total, steps);
        store_bytes(to, steps);
    };
    for (int64_t k = 0; k < full; k += LANES) cut(load(x + k), q + k);
    if (rest) cut(load(x + full, rest), q + full);
    // Of a row that is not finite it may overflow; its scale says so.
    *excess = static_cast<int32_t>(128u * static_cast<uint32_t>(sum(total)));
}

// Cut a block of rows, into memory of this thread.
template <class T> static QuantizedRows quantize_rows(const T *x, int64_t inputs, int64_t rows) {
    static thread_local Scratch scratch;
    const int64_t stride = byte_stride(inputs);
    const size_t size = rows * (sizeof(float) + sizeof(int32_t) + stride);
    auto *scales = static_cast<float *>(scratch.reserve(size));
    auto *excess = reinterpret_cast<int32_t *>(scales + rows);
    auto *q = reinterpret_cast<int8_t *>(excess + rows);
    for (int64_t r = 0; r < rows; ++r)
        quantize_activations(x + r * inputs, inputs, q + r * stride, scales + r, excess + r);
    return {q, scales, excess};
}

// What the tiles of one panel and one block of rows share.
template <class T> struct Block {
    const PackedLinear &linear;
    int64_t panel, first;     // row
    const void *weights;      // of the panel
    const T *x;               // of the first row
    QuantizedRows bytes;      // int8_dynamic
    const float *group_sums;  // of grouped weights with minimums, (rows, groups)
    PrefetchRange *prefetch;  // what is read after the panel
};

// acc = R rows of bytes, from `row` of the block on, by a panel of fours of bytes.
template <int R, class T>
INLINE void sum_bytes(F32 (&acc)[R][2], const Block<T> &block, int64_t row) {
    const int64_t inputs = block.linear.inputs;
    const auto *panel = static_cast<const uint8_t *>(block.weights);
    const RowPointers<R, int8_t> rows(
        block.bytes.q + row * byte_stride(inputs), byte_stride(inputs));
    I32 whole[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) whole[r][0] = whole[r][1] = splat_int(0);
    for (int64_t k = 0; k < inputs; k += 4, panel += 4 * PANEL) {
        look_ahead<R>(panel, 4 * PANEL, k, *block.prefetch);
        const I32 a = load_int(panel), b = load_int(panel + 2 * PANEL);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const I32 four = splat_words(rows[r] + k);
            whole[r][0] = dot_bytes(whole[r][0], a, four);
            whole[r][1] = dot_bytes(whole[r][1], b, four);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const I32 excess = splat_int(block.bytes.excess[row + r]);
        const F32 scale = splat(block.bytes.scales[row + r]);
        acc[r][0] = mul(to_float(sub(whole[r][0], excess)), scale);
        acc[r][1] = mul(to_float(sub(whole[r][1], excess)), scale);
    }
}

// Scale the sums of some rows, add the bias, and put them where they belong. WHOLE: all outputs of
// the panel are there.
template <class T, Epilogue E, bool WHOLE, Activation A = Activation::silu>
static __attribute__((noinline)) void finish_rows(
    const PackedLinear &linear, int64_t panel, int64_t row, int64_t rows, const float *sums,
    void *y) {
    using Kept = std::conditional_t<E == Epilogue::widen, float, T>;
    const int64_t half = linear.outputs / 2;
    const int64_t at = panel * (linear.halves ? LANES : PANEL);
    const int64_t at_b = at + (linear.halves ? half : LANES);
    const int64_t left = (linear.halves ? half : linear.outputs) - at;
    const int64_t left_b = linear.halves ? left : left - LANES;
    const int64_t columns = E == Epilogue::gate ? half : linear.outputs;
    const auto put = [](Kept *to, F32 lanes, int64_t some) {
        if (WHOLE || some >= LANES) store(to, lanes);
        else if (some > 0) store(to, lanes, static_cast<int>(some));
    };
    const float *scales = linear.scales ? linear.scales + panel * PANEL : nullptr;
    const float *bias = linear.bias ? linear.bias + panel * PANEL : nullptr;
    Kept *to = static_cast<Kept *>(y) + row * columns;
    for (int64_t r = 0; r < rows; ++r, sums += PANEL, to += columns) {
        F32 a = load(sums), b = load(sums + LANES);
        if (scales) {
            a = mul(a, load(scales));
            b = mul(b, load(scales + LANES));
        }
        if (bias) {
            a = add(a, load(bias));
            b = add(b, load(bias + LANES));
        }
        if constexpr (E == Epilogue::gate) {
            F32 gate = rounded<T>(a);
            if (linear.gate_scale != 1.0f) gate = rounded<T>(mul(gate, splat(linear.gate_scale)));
            put(to + at, gated<A, T>(gate, rounded<T>(b)), left);
        } else if constexpr (E == Epilogue::activate) {
            put(to + at, activated<A>(rounded<T>(a)), left);
            put(to + at_b, activated<A>(rounded<T>(b)), left_b);
        } else {
            put(to + at, a, left);
            put(to + at_b, b, left_b);
        }
    }
}

using Finish = void (*)(const PackedLinear &, int64_t, int64_t, int64_t, const float *, void *);

// What finishes the rows of a panel.
template <class T>
INLINE Finish finish_of(const PackedLinear &linear, int64_t panel, Epilogue epilogue) {
    const int64_t width = linear.halves ? LANES : PANEL;
    const int64_t outputs = linear.halves ? linear.outputs / 2 : linear.outputs;
    const bool whole = (panel + 1) * width <= outputs;
    const auto of = [&](auto kind) {
        return whole ? finish_rows<T, kind(), true> : finish_rows<T, kind(), false>;
    };
    switch (epilogue) {
        case Epilogue::store: return of(std::integral_constant<Epilogue, Epilogue::store>());
        case Epilogue::widen: return of(std::integral_constant<Epilogue, Epilogue::widen>());
        case Epilogue::activate:
            return by_activation(linear.activation, [&](auto kind) {
                return whole ? finish_rows<T, Epilogue::activate, true, kind()>
                             : finish_rows<T, Epilogue::activate, false, kind()>;
            });
        default:
            return by_activation(linear.activation, [&](auto kind) {
                return whole ? finish_rows<T, Epilogue::gate, true, kind()>
                             : finish_rows<T, Epilogue::gate, false, kind()>;
            });
    }
}

// One register tile: R rows from `row` of the block on, by its panel.
template <Weights W, class T, int R>
static void tile(const Block<T> &block, int64_t row, void *y, Epilogue epilogue) {
    F32 acc[R][2];
    if constexpr (W == Weights::int8_dynamic) {
        sum_bytes<R>(acc, block, row);
    } else {
        using Kept = std::conditional_t<W == Weights::int8, int8_t, T>;
        const auto *panel = static_cast<const Kept *>(block.weights);
        const T *x = block.x + row * block.linear.inputs;
        sum_products<R>(acc, panel, block.linear.inputs, x, *block.prefetch);
    }
    alignas(64) float sums[R][PANEL];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        store(sums[r], acc[r][0]);
        store(sums[r] + LANES, acc[r][1]);
    }
    const Finish finish = finish_of<T>(block.linear, block.panel, epilogue);
    finish(block.linear, block.panel, block.first + row, R, sums[0], y);
}

template <class T> using Tile = void (*)(const Block<T> &, int64_t, void *, Epilogue);

template <Weights W, class T> static Tile<T> tile_of_height(int64_t rows) {
    static constexpr Tile<T> TILES[] = {
        tile<W, T, 1>, tile<W, T, 2>,  tile<W, T, 3>,
#if ANTIPHON_AVX512
        tile<W, T, 4>, tile<W, T, 5>,  tile<W, T, 6>,  tile<W, T, 7>,  tile<W, T, 8>,
        tile<W, T, 9>, tile<W, T, 10>, tile<W, T, 11>, tile<W, T, 12>,
#endif
    };
    static_assert(sizeof(TILES) / sizeof(TILES[0]) == TILE_ROWS);
    return TILES[rows - 1];
}

template <class T> static Tile<T> tile_for(Weights weights, int64_t rows) {
    constexpr Weights plain = std::is_same_v<T, bf16> ? Weights::bf16 : Weights::f32;
    if (weights == Weights::int8) return tile_of_height<Weights::int8, T>(rows);
    if (weights == Weights::int8_dynamic) return tile_of_height<Weights::int8_dynamic, T>(rows);
    return tile_of_height<plain, T>(rows);
}

}  // namespace ISA_NS
