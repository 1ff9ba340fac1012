// A packed linear shared out: chunks of rows by panels, for the threads of a team (team.h).
//
//     LinearCall call(linear, x, rows, y, Epilogue::store, threads);  // of this thread
//     member.run(call.chunks(), [&](int64_t i) { call.chunk(i, call.prefetch(i)); });

#pragma once

#include "amx.h"
#include "amx_bytes.h"
#include "amx_linear.h"
#include "gemm.h"
#include "groups.h"
#include "simd.h"
#include "team.h"

namespace ISA_NS {

// How a call is cut: blocks of rows by groups of panels.
struct ChunkPlan {
    int64_t rows, row_blocks, panels, panel_groups;
    // Whether chunks of one block of rows follow each other, and not those of one group of panels.
    bool by_rows;
};

// How many rows are computed at once, and how many take no longer than a panel takes to be read.
struct TileSizes {
    int64_t tile_rows, free_rows, block_rows;
};

// The most rows of a register tile. Rows whose distance is a multiple of 4 KiB, as of 2,048 and 4,096
// numbers of bf16, begin in one set of the first-level cache, where twelve of them push each other out:
// on a Zen 5 tiles of 8 are 16 % faster then.
INLINE int64_t tile_rows_of(const PackedLinear &linear) {
    constexpr int64_t WAYS_APART = 4096, FITTING = 8;
    const int64_t row_bytes = linear.inputs * (linear.dtype == Dtype::bf16 ? 2 : 4);
    return row_bytes % WAYS_APART == 0 && FITTING < TILE_ROWS ? FITTING : TILE_ROWS;
}

static TileSizes tile_sizes_of(const PackedLinear &linear) {
    // A block of rows stays in the second-level cache beside its panels. On AMX it is so large
    // that the weights of most steps are read once, and not by every thread.
    if (uses_amx(linear)) return {AMX_BLOCK_ROWS, AMX_BLOCK_ROWS, 256};
    return {tile_rows_of(linear), 4, 48};
}

// Whether rows are cut to bytes before tiles multiply them by the bytes of a panel.
INLINE bool in_planes(const PackedLinear &linear) {
    return uses_amx(linear) && linear.weights == Weights::int8;
}

static ChunkPlan cut(const PackedLinear &linear, int64_t rows, int threads) {
    // Enough chunks that a thread which lost its core holds up little; none so small that the
    // ticket costs more than the work. A group of panels stays in the second-level cache while
    // all blocks of rows come by, or a block of rows as planes while all panels do. Tiles multiply
    // faster than a core reads what others wrote: of many rows their chunks are as large as that
    // cache allows (ADR 19).
    constexpr int64_t CHUNKS = 48, CHUNK_BYTES = 48 << 10, GROUP_BYTES = 768 << 10;
    constexpr int64_t AMX_CHUNKS_A_THREAD = 8, AMX_GROUP_BYTES = 1200 << 10;
    const TileSizes sizes = tile_sizes_of(linear);
    const int64_t panels = panels_of(linear);
    const int64_t row_blocks = ceil_div(rows, sizes.block_rows);
    int64_t block = ceil_div(rows, row_blocks);
    if (row_blocks > 1) block = ceil_div(block, sizes.tile_rows) * sizes.tile_rows;
    // Each chunk of int8_dynamic cuts its rows to bytes again.
    const int64_t smallest = linear.weights == Weights::int8_dynamic && rows > 4
        ? 8
        : ceil_div(CHUNK_BYTES, panel_bytes(linear) * ceil_div(rows, sizes.free_rows));
    const bool large = uses_amx(linear) && row_blocks > 1;
    const int64_t largest = (large ? AMX_GROUP_BYTES : GROUP_BYTES) / panel_bytes(linear);
    int64_t group = panels * row_blocks / (large ? AMX_CHUNKS_A_THREAD * threads : CHUNKS);
    group = group > largest ? largest : group;
    group = group < smallest ? smallest : group;
    group = group < 1 ? 1 : group > panels ? panels : group;
    // Rows that are cut to planes are so once by each thread that has chunks of their block.
    return {block, ceil_div(rows, block), group, ceil_div(panels, group), in_planes(linear)};
}

// What computes `rows` rows of a panel at once.
template <class T> static Tile<T> tile_for(const PackedLinear &linear, int64_t rows) {
    if (linear.weights == Weights::grouped) return grouped_tile_for<T>(linear.grouping.bits, rows);
    return tile_for<T>(linear.weights, rows);
}

INLINE const char *panel_at(const PackedLinear &linear, int64_t panel) {
    return static_cast<const char *>(linear.panels) + panel * panel_bytes(linear);
}

// A block of rows by panels [panel, last), while the memory is asked for what is read after; x
// begins with the block, y with the row that it is `first` rows after.
template <class T>
static void linear_block(
    const PackedLinear &linear, int64_t panel, int64_t last, const T *x, int64_t first,
    int64_t rows, void *y, Epilogue epilogue, const PrefetchRange &prefetch) {
    if constexpr (std::is_same_v<T, bf16>) {
        if (in_planes(linear)) {
            const BytePlanes planes = split_rows_to_bytes(x, linear.inputs, rows);
            int8_linear_amx(linear, panel, last, planes, first, rows, y, epilogue, prefetch);
            return;
        }
        if (uses_amx(linear)) {
            linear_amx(linear, panel, last, x, first, rows, y, epilogue, prefetch);
            return;
        }
    }
    PrefetchRange following;
    Block<T> block{linear, 0, first, nullptr, x, {}, sum_groups(linear, x, rows), &following};
    if (linear.weights == Weights::int8_dynamic)
        block.bytes = quantize_rows(x, linear.inputs, rows);
    const int64_t tiles = ceil_div(rows, tile_rows_of(linear));
    // A panel stays in the first-level cache, and rows come by.
    for (block.panel = panel; block.panel < last; ++block.panel) {
        block.weights = panel_at(linear, block.panel);
        const int64_t bytes = panel_bytes(linear);
        following = block.panel + 1 < last ? PrefetchRange(panel_at(linear, block.panel + 1), bytes)
                                           : prefetch.first(bytes);
        following.share(tiles * ceil_div(linear.inputs, prefetch_inputs(linear.weights)));
        // Tiles of like height: 16 rows are 8 and 8.
        for (int64_t tile = 0, row = 0; tile < tiles; ++tile) {
            const int64_t height = (rows - row) / (tiles - tile);
            tile_for<T>(linear, height)(block, row, y, epilogue);
            row += height;
        }
    }
}

// One call of a linear as one thread sees it, in chunks that may be computed in any order, by any
// thread; a thread that has begun another call does not come back to this one, whose planes are
// gone. Contiguous are x (rows, inputs) and y (rows, outputs), of half as many columns with
// a gate.
class LinearCall {
  public:
    LinearCall(
        const PackedLinear &linear, const void *x, int64_t rows, void *y, Epilogue epilogue,
        int threads)
        : linear_(linear),
          x_(x),
          rows_(rows),
          y_(y),
          epilogue_(epilogue),
          threads_(threads),
          cut_(cut(linear, rows, threads)) {}

    int64_t chunks() const { return cut_.row_blocks * cut_.panel_groups; }

    // Compute one of them, and ask the memory meanwhile.
    void chunk(int64_t i, const PrefetchRange &prefetch) {
        if (linear_.dtype == Dtype::bf16) compute<bf16>(i, prefetch);
        else compute<float>(i, prefetch);
    }

    // The weights that the thread of chunk `i` most likely reads after it: of this call, or of
    // `next`, whose rows are as many.
    PrefetchRange prefetch(int64_t i, const PackedLinear *next = nullptr) const {
        const int64_t later = i + threads_;
        if (later < chunks())
            return group_of(later) == group_of(i) ? PrefetchRange() : weights(later);
        if (next == nullptr) return {};
        const LinearCall following(*next, nullptr, rows_, nullptr, Epilogue::store, threads_);
        const int64_t first = later - chunks();
        return first < following.chunks() ? following.weights(first) : PrefetchRange();
    }

  private:
    int64_t group_of(int64_t i) const {
        return cut_.by_rows ? i % cut_.panel_groups : i / cut_.row_blocks;
    }
    int64_t block_of(int64_t i) const {
        return cut_.by_rows ? i / cut_.panel_groups : i % cut_.row_blocks;
    }
    int64_t first_panel(int64_t group) const { return group * cut_.panels; }
    int64_t last_panel(int64_t group) const {
        const int64_t end = (group + 1) * cut_.panels, panels = panels_of(linear_);
        return end < panels ? end : panels;
    }

    // What a chunk reads of the linear.
    PrefetchRange weights(int64_t i) const {
        const int64_t first = first_panel(group_of(i)), last = last_panel(group_of(i));
        return {panel_at(linear_, first), (last - first) * panel_bytes(linear_)};
    }

    template <class T> void compute(int64_t i, const PrefetchRange &prefetch) {
        const int64_t first = block_of(i) * cut_.rows;
        const int64_t rows = rows_ - first < cut_.rows ? rows_ - first : cut_.rows;
        const int64_t panel = first_panel(group_of(i)), last = last_panel(group_of(i));
        const T *x = static_cast<const T *>(x_) + first * linear_.inputs;
        if constexpr (std::is_same_v<T, bf16>) {
            if (in_planes(linear_)) {
                if (block_of(i) != planes_of_)
                    planes_ = split_rows_to_bytes(x, linear_.inputs, rows);
                planes_of_ = block_of(i);
                int8_linear_amx(
                    linear_, panel, last, planes_, first, rows, y_, epilogue_, prefetch);
                return;
            }
        }
        linear_block(linear_, panel, last, x, first, rows, y_, epilogue_, prefetch);
    }

    const PackedLinear &linear_;
    const void *const x_;
    const int64_t rows_;
    void *const y_;
    const Epilogue epilogue_;
    const int threads_;
    const ChunkPlan cut_;
    BytePlanes planes_ = {};  // of the block of rows that was computed last
    int64_t planes_of_ = -1;  // its number
};

// A whole call, with a team of its own.
static void linear_call(
    const PackedLinear &linear, const void *x, int64_t rows, void *y, Epilogue epilogue,
    int threads) {
    Phase phase{};
    in_team(threads, &phase, [&](TeamThread &member) {
        LinearCall call(linear, x, rows, y, epilogue, member.threads());
        member.run(call.chunks(), [&](int64_t i) { call.chunk(i, call.prefetch(i)); });
    });
}

// The weights of one output, as floats are kept: what a table of embeddings is asked for.
template <class T> static void linear_row(const PackedLinear &linear, int64_t output, T *y) {
    const int64_t half = linear.outputs / 2;
    const bool second = linear.halves && output >= half;
    const int64_t within = second ? output - half : output;
    const int64_t width = linear.halves ? LANES : PANEL;
    const int64_t lane = within % width + (second ? LANES : 0);
    const char *panel =
        static_cast<const char *>(linear.panels) + within / width * panel_bytes(linear);
    if (linear.weights == Weights::bf16 || linear.weights == Weights::f32) {
        constexpr int64_t GROUP = std::is_same_v<T, bf16> ? 2 : 1;
        const T *at = reinterpret_cast<const T *>(panel) + lane * GROUP;
        for (int64_t k = 0; k < linear.inputs; ++k)
            y[k] = at[k / GROUP * GROUP * PANEL + k % GROUP];
        return;
    }
    if (linear.weights == Weights::grouped) {
        grouped_row(linear, panel, lane, y);
        return;
    }
    constexpr int64_t GROUP = 4;
    const bool dynamic = linear.weights == Weights::int8_dynamic;
    const char *at = panel + lane * GROUP;
    const float scale = linear.scales[within / width * PANEL + lane];
    for (int64_t k = 0; k < linear.inputs; ++k) {
        const char byte = at[k / GROUP * GROUP * PANEL + k % GROUP];
        const int value = dynamic ? static_cast<uint8_t>(byte) - 128 : static_cast<int8_t>(byte);
        store(y + k, splat(static_cast<float>(value) * scale), 1);
    }
}

// Several of them: y (count, inputs).
static void linear_rows(
    const PackedLinear &linear, const int64_t *outputs, int64_t count, void *y, int threads) {
#pragma omp parallel for num_threads(threads) if (count >= 32)
    for (int64_t i = 0; i < count; ++i) {
        if (linear.dtype == Dtype::bf16)
            linear_row(linear, outputs[i], static_cast<bf16 *>(y) + i * linear.inputs);
        else linear_row(linear, outputs[i], static_cast<float *>(y) + i * linear.inputs);
    }
}

}  // namespace ISA_NS
