// A packed linear of bytes on AMX: tiles of 16 rows by a panel, in whole numbers.
//
// Bytes are multiplied as they lie, by rows that are cut to two bytes a number, x ~ (256 upper +
// lower) * scale, the greatest number of a row being 32,512 of its steps. A number loses a 65,024th
// of that at most: over a row of up to 16,000 inputs this is less noise than rounding them to bf16
// has made, whatever they are. Sums of whole numbers are exact, so a row has the same bits in any
// order.

#pragma once

#include "amx.h"
#include "amx_linear.h"
#include "gemm.h"
#include "simd.h"
#include "team.h"
#include "vectors.h"

namespace ISA_NS {

#if ANTIPHON_AMX

static constexpr int BYTES_STEP = 64;

// Rows cut to bytes: upper and lower ones, each `stride` apart and zero beyond the inputs.
struct BytePlanes {
    const int8_t *upper, *lower;
    const float *scales;
    int64_t stride;
};

INLINE void split_to_bytes(
    const bf16 *x, int64_t inputs, int8_t *upper, int8_t *lower, float *scale) {
    F32 top = zeros();
    by_vectors(
        inputs, [&](int64_t i, auto part) { top = magnitude_max(top, load_part(x + i, part)); });
    *scale = max_magnitude(top) / 32512.0f;
    // So small a row is zero; a NaN or infinity is in its scale, and so in all that comes of it.
    const F32 inverse = splat(*scale > 1e-30f ? 1.0f / *scale : 0.0f);
    by_vectors(inputs, [&](int64_t i, auto part) {
        const I32 steps = to_int(mul(load_part(x + i, part), inverse));
        store_bytes(upper + i, {_mm512_srai_epi32(add(steps, splat_int(128)).v, 8)});
        store_bytes(lower + i, steps);  // their last eight bits, signed
    });
}

// Cut rows, into memory of this thread.
static BytePlanes split_rows_to_bytes(const bf16 *x, int64_t inputs, int64_t rows) {
    static thread_local Scratch scratch;
    const int64_t stride = ceil_div(inputs, BYTES_STEP) * BYTES_STEP;
    auto *upper = static_cast<int8_t *>(scratch.reserve(rows * (2 * stride + sizeof(float))));
    int8_t *lower = upper + rows * stride;
    auto *scales = reinterpret_cast<float *>(lower + rows * stride);  // behind whole steps
    const int64_t rest = stride - inputs;
    for (int64_t r = 0; r < rows; ++r) {
        int8_t *high = upper + r * stride, *low = lower + r * stride;
        split_to_bytes(x + r * inputs, inputs, high, low, scales + r);
        std::memset(high + inputs, 0, rest);
        std::memset(low + inputs, 0, rest);
    }
    return {upper, lower, scales, stride};
}

// The tiles of one chunk. Between the products of one, the sums of the one before are finished.
// Tiles 0 and 1 are sums of upper bytes, 2 and 3 of lower ones; 4 and 5 are rows, 6 and 7 panels.
class ByteTiles {
  public:
    // How often a step prefetches.
    static constexpr int64_t PREFETCHES = 4;

    ByteTiles(
        const PackedLinear &linear, const BytePlanes &planes, void *y, Epilogue epilogue,
        PrefetchRange prefetch)
        : linear_(linear), planes_(planes), y_(y), epilogue_(epilogue), prefetch_(prefetch) {}

    // Up to AMX_ROWS rows of the planes, from `row` on, the `first + row`-th of y, by a panel.
    template <Resident RESIDENT>
    void multiply(
        int64_t row, int64_t first, int64_t height, int64_t panel, const int8_t *weights) {
        const int64_t inputs = linear_.inputs, whole = inputs / BYTES_STEP * BYTES_STEP;
        const int8_t *upper = planes_.upper + row * planes_.stride;
        const int8_t *lower = planes_.lower + row * planes_.stride;
        a_step_ = ceil_div(pending_.rows * BYTES_STEP, inputs);
        amx_.shape(height, height);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < whole; k += BYTES_STEP)
            step<RESIDENT>(upper + k, lower + k, weights + k * PANEL);
        if (whole < inputs) last_step(upper + whole, lower + whole, weights + whole * PANEL);
        constexpr int64_t STRIDE = PANEL * sizeof(int32_t);
        Sums &sums = sums_[side_];
        _tile_stored(0, sums.upper[0], STRIDE);
        _tile_stored(1, sums.upper[0] + AMX_ROWS, STRIDE);
        _tile_stored(2, sums.lower[0], STRIDE);
        _tile_stored(3, sums.lower[0] + AMX_ROWS, STRIDE);
        AmxTiles::written();
        finish();
        const Finish finish_row = finish_of<bf16>(linear_, panel, epilogue_);
        pending_ = {finish_row, panel, first + row, height, &sums, planes_.scales + row};
        done_ = 0;
        side_ ^= 1;
    }

    // Finish what is left.
    void finish() { finish(pending_.rows); }

  private:
    struct Sums {
        alignas(64) int32_t upper[AMX_ROWS][PANEL], lower[AMX_ROWS][PANEL];
    };

    // Rows of sums that are to be finished.
    struct PendingRows {
        Finish finish;
        int64_t panel, row, rows;
        const Sums *sums;
        const float *scales;
    };

    __attribute__((always_inline)) void finish(int64_t rows) {
        for (; rows > 0 && pending_.rows > 0; --rows, --pending_.rows, ++pending_.row, ++done_) {
            alignas(64) float sums[PANEL];
            const F32 scale = splat(pending_.scales[done_]);
            for (int lane = 0; lane < PANEL; lane += LANES) {
                const F32 upper = to_float(load_int(pending_.sums->upper[done_] + lane));
                const F32 lower = to_float(load_int(pending_.sums->lower[done_] + lane));
                store(sums + lane, mul(fma(upper, splat(256.0f), lower), scale));
            }
            pending_.finish(linear_, pending_.panel, pending_.row, 1, sums, y_);
        }
    }

    template <Resident RESIDENT>
    __attribute__((always_inline)) void step(
        const int8_t *upper, const int8_t *lower, const int8_t *panel) {
        constexpr int64_t FOURS = 4 * PANEL;
        AmxTiles::written();
        prefetch_.step();
        LOAD(6, RESIDENT == Resident::rows, panel, FOURS);
        prefetch_.step();
        LOAD(4, RESIDENT == Resident::panel, upper, planes_.stride);
        _tile_dpbssd(0, 4, 6);
        prefetch_.step();
        LOAD(7, RESIDENT == Resident::rows, panel + 4 * AMX_ROWS, FOURS);
        prefetch_.step();
        _tile_dpbssd(1, 4, 7);
        LOAD(5, RESIDENT == Resident::panel, lower, planes_.stride);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
        AmxTiles::written();
        finish(a_step_);
    }

    // Fewer inputs than a step has: behind them rows are zero, and others' are the weights.
    void last_step(const int8_t *upper, const int8_t *lower, const int8_t *panel) {
        alignas(64) int8_t fours[AMX_ROWS][4 * PANEL] = {};
        std::memcpy(fours, panel, ceil_div(linear_.inputs % BYTES_STEP, 4) * sizeof(fours[0]));
        step<Resident::panel>(upper, lower, fours[0]);
    }

    const PackedLinear &linear_;
    const BytePlanes planes_;
    void *const y_;
    const Epilogue epilogue_;
    PrefetchRange prefetch_;
    AmxTiles amx_;
    PendingRows pending_ = {};
    int64_t a_step_ = 0;  // rows that are finished in a step
    int64_t done_ = 0;    // rows of the sums that are left which are finished
    int side_ = 0;
    Sums sums_[2];
};

#undef LOAD

// Rows of x as planes, the `first` of y and on, by some panels.
static void int8_linear_amx(
    const PackedLinear &linear, int64_t panel_first, int64_t panel_last, const BytePlanes &planes,
    int64_t first, int64_t rows, void *y, Epilogue epilogue, PrefetchRange prefetch) {
    const int64_t tiles = ceil_div(rows, AMX_ROWS), panels = panel_last - panel_first;
    const int64_t steps =
        tiles * panels * ceil_div(linear.inputs, BYTES_STEP) * ByteTiles::PREFETCHES;
    ByteTiles products(
        linear, planes, y, epilogue,
        prefetch_beside(linear, panel_first, panels, tiles, steps, prefetch));
    for (int64_t panel = panel_first; panel < panel_last; ++panel) {
        const auto *weights =
            static_cast<const int8_t *>(linear.panels) + panel * panel_bytes(linear);
        by_tiles(tiles, rows, [&](int64_t row, int64_t height) {
            if (tiles > 1) products.multiply<Resident::panel>(row, first, height, panel, weights);
            else products.multiply<Resident::rows>(row, first, height, panel, weights);
        });
    }
    products.finish();
}

#else

struct BytePlanes {};
static BytePlanes split_rows_to_bytes(const bf16 *, int64_t, int64_t) { return {}; }
static void int8_linear_amx(
    const PackedLinear &, int64_t, int64_t, const BytePlanes &, int64_t, int64_t, void *, Epilogue,
    PrefetchRange) {}

#endif

}  // namespace ISA_NS
