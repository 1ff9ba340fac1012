// A packed linear on AMX: tiles of 32 rows by a panel, four AMX tiles of sums.

#pragma once

#include "amx.h"
#include "gemm.h"
#include "simd.h"
#include "team.h"

namespace ISA_NS {

#if ANTIPHON_AMX

// Load a tile, whose number must be a literal.
#define LOAD(TILE, PASSES, ...)                                  \
    if constexpr (PASSES) _tile_stream_loadd(TILE, __VA_ARGS__); \
    else _tile_loadd(TILE, __VA_ARGS__)

// Which operand of its tiles a thread finds in the first-level cache: the other is loaded without
// evicting it.
enum class Resident { rows, panel };

// The tiles of one chunk, one after the other. Between the products of one, the sums of the one
// before are finished, and what comes later is prefetched: other units do that.
class Bf16Tiles {
  public:
    // How often a step prefetches.
    static constexpr int64_t PREFETCHES = 4;

    Bf16Tiles(const PackedLinear &linear, void *y, Epilogue epilogue, PrefetchRange prefetch)
        : linear_(linear), y_(y), epilogue_(epilogue), prefetch_(prefetch) {}

    // Up to AMX_BLOCK_ROWS rows, the `row`-th of y and on, by a panel.
    template <Resident RESIDENT>
    void multiply(const bf16 *x, int64_t row, int64_t height, int64_t panel, const bf16 *weights) {
        const int64_t upper = height < AMX_ROWS ? height : AMX_ROWS, lower = height - upper;
        amx_.shape(upper, lower);
        if (lower) multiply<RESIDENT, true>(x, height, weights);
        else multiply<RESIDENT, false>(x, height, weights);
        finish();
        pending_ = {
            finish_of<bf16>(linear_, panel, epilogue_), panel, row, height, sums_[side_][0]};
        side_ ^= 1;
    }

    // Finish what is left.
    void finish() { finish(pending_.rows); }

  private:
    // Rows of sums that are to be finished.
    struct PendingRows {
        Finish finish;
        int64_t panel, row, rows;
        const float *sums;
    };

    __attribute__((always_inline)) void finish(int64_t rows) {
        if (rows > pending_.rows) rows = pending_.rows;
        if (rows == 0) return;
        pending_.finish(linear_, pending_.panel, pending_.row, rows, pending_.sums, y_);
        pending_.row += rows;
        pending_.rows -= rows;
        pending_.sums += rows * PANEL;
    }

    template <Resident RESIDENT, bool BOTH>
    void multiply(const bf16 *x, int64_t height, const bf16 *panel) {
        const int64_t inputs = linear_.inputs, whole = inputs / STEP * STEP;
        a_step_ = ceil_div(pending_.rows * STEP, inputs);
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (BOTH) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t k = 0; k < whole; k += STEP)
            step<RESIDENT, BOTH>(x + k, inputs, panel + k * PANEL);
        if (whole < inputs) last_step<BOTH>(x + whole, height, panel + whole * PANEL);
        constexpr int64_t STRIDE = PANEL * sizeof(float);
        float *sums = sums_[side_][0];
        _tile_stored(0, sums, STRIDE);
        _tile_stored(1, sums + AMX_ROWS, STRIDE);
        if constexpr (BOTH) {
            _tile_stored(2, sums + AMX_ROWS * PANEL, STRIDE);
            _tile_stored(3, sums + AMX_ROWS * PANEL + AMX_ROWS, STRIDE);
        }
        AmxTiles::written();
    }

    template <Resident RESIDENT, bool BOTH>
    __attribute__((always_inline)) void step(const bf16 *x, int64_t stride, const bf16 *panel) {
        constexpr int64_t PAIRS = 2 * PANEL * sizeof(bf16);
        const int64_t bytes = stride * static_cast<int64_t>(sizeof(bf16));
        AmxTiles::written();
        prefetch_.step();
        LOAD(6, RESIDENT == Resident::rows, panel, PAIRS);
        prefetch_.step();
        LOAD(4, RESIDENT == Resident::panel, x, bytes);
        _tile_dpbf16ps(0, 4, 6);
        prefetch_.step();
        LOAD(7, RESIDENT == Resident::rows, panel + 2 * AMX_ROWS, PAIRS);
        prefetch_.step();
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (BOTH) {
            LOAD(5, RESIDENT == Resident::panel, x + AMX_ROWS * stride, bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        AmxTiles::written();
        finish(a_step_);
    }

    // Fewer inputs than a step has: what lies behind them is others', and must count for nothing.
    template <bool BOTH> void last_step(const bf16 *x, int64_t height, const bf16 *panel) {
        alignas(64) bf16 rows[AMX_BLOCK_ROWS][STEP] = {};
        alignas(64) bf16 pairs[AMX_ROWS][2 * PANEL] = {};
        const int64_t inputs = linear_.inputs, rest = inputs % STEP;
        for (int64_t r = 0; r < height; ++r)
            std::memcpy(rows[r], x + r * inputs, rest * sizeof(bf16));
        std::memcpy(pairs, panel, ceil_div(rest, 2) * sizeof(pairs[0]));
        step<Resident::panel, BOTH>(rows[0], STEP, pairs[0]);
    }

    const PackedLinear &linear_;
    void *const y_;
    const Epilogue epilogue_;
    PrefetchRange prefetch_;
    AmxTiles amx_;
    PendingRows pending_ = {};
    int64_t a_step_ = 0;  // rows that are finished in a step
    int side_ = 0;
    alignas(64) float sums_[2][AMX_BLOCK_ROWS][PANEL];
};

// What is prefetched while `tiles` tiles of rows are multiplied by some panels in so many steps: what
// comes, and where the panels are read once, what lies a little further on in them.
static PrefetchRange prefetch_beside(
    const PackedLinear &linear, int64_t panel, int64_t panels, int64_t tiles, int64_t steps,
    PrefetchRange prefetch) {
    const char *weights = static_cast<const char *>(linear.panels) + panel * panel_bytes(linear);
    if (tiles > 1) prefetch.share(steps);
    else prefetch.share_beside(weights, panels * panel_bytes(linear), steps);
    return prefetch;
}

// Call `body(first, height)` for each of so many tiles, of like height: 40 rows are 20 and 20.
template <class Body> INLINE void by_tiles(int64_t tiles, int64_t rows, Body &&body) {
    for (int64_t i = 0, row = 0; i < tiles; ++i) {
        const int64_t height = (rows - row) / (tiles - i);
        body(row, height);
        row += height;
    }
}

// Rows x, the `first` of y and on, by some panels.
static void linear_amx(
    const PackedLinear &linear, int64_t panel_first, int64_t panel_last, const bf16 *x,
    int64_t first, int64_t rows, void *y, Epilogue epilogue, PrefetchRange prefetch) {
    const int64_t tiles = ceil_div(rows, AMX_BLOCK_ROWS), panels = panel_last - panel_first;
    const int64_t steps = tiles * panels * ceil_div(linear.inputs, STEP) * Bf16Tiles::PREFETCHES;
    Bf16Tiles products(
        linear, y, epilogue, prefetch_beside(linear, panel_first, panels, tiles, steps, prefetch));
    const auto multiply = [&](auto stays, int64_t row, int64_t height, int64_t panel) {
        const char *weights =
            static_cast<const char *>(linear.panels) + panel * panel_bytes(linear);
        products.multiply<stays()>(
            x + row * linear.inputs, first + row, height, panel,
            reinterpret_cast<const bf16 *>(weights));
    };
    if (panels < tiles) {
        for (int64_t panel = panel_first; panel < panel_last; ++panel)
            by_tiles(tiles, rows, [&](int64_t row, int64_t height) {
                multiply(std::integral_constant<Resident, Resident::panel>(), row, height, panel);
            });
    } else {
        by_tiles(tiles, rows, [&](int64_t row, int64_t height) {
            for (int64_t panel = panel_first; panel < panel_last; ++panel)
                multiply(std::integral_constant<Resident, Resident::rows>(), row, height, panel);
        });
    }
    products.finish();
}

#else

static void linear_amx(
    const PackedLinear &, int64_t, int64_t, const bf16 *, int64_t, int64_t, void *, Epilogue,
    PrefetchRange) {}

#endif

}  // namespace ISA_NS
