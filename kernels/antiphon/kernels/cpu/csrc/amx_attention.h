// Queries meet a block of keys on AMX: scores and sums in squares of 16 queries (amx.h).
//
// What is laid out for registers is what a tile holds: pairs of dimensions by keys, and pairs of
// keys by dimensions. One query alone is computed so too, and has the same bits.

#pragma once

#include "amx.h"
#include "attention_block.h"
#include "fp8.h"
#include "layout.h"
#include "simd.h"

namespace ISA_NS {

#if ANTIPHON_AMX

// Put a task's queries side by side, head by head, as squares read them.
INLINE void gather_queries(
    const AttentionCall &call, const AttentionTask &task, AttentionScratch<bf16> &room) {
    const int64_t size = call.shape.head_size, each = task.queries * call.shape.queries_per_head;
    uint32_t *to = room.queries_transposed;
    for (int64_t head = 0; head < task.heads; ++head)
        for (int64_t i = 0; i < each; ++i, to += room.square_words)
            std::memcpy(to, query_at<bf16>(call, task, head, i), size * sizeof(bf16));
}

// The scores of all keys of the block, four squares of them at a time.
INLINE void scores_amx(
    const uint32_t *queries, const KeyBlock &block, AttentionScratch<bf16> &room) {
    constexpr int64_t KEY_BYTES = KEYS * sizeof(uint32_t);
    const int64_t words = room.square_words;
    for (int64_t key = 0; key < block.until; key += 4 * AMX_ROWS) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t word = 0; word < words; word += AMX_ROWS) {
            const uint32_t *keys = room.keys + word * KEYS + key;
            _tile_loadd(4, queries + word, words * sizeof(uint32_t));
            _tile_loadd(6, keys, KEY_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, keys + AMX_ROWS, KEY_BYTES);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, keys + 2 * AMX_ROWS, KEY_BYTES);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, keys + 3 * AMX_ROWS, KEY_BYTES);
            _tile_dpbf16ps(3, 4, 7);
        }
        float *scores = room.scores[0] + key;
        _tile_stored(0, scores, KEY_BYTES);
        _tile_stored(1, scores + AMX_ROWS, KEY_BYTES);
        _tile_stored(2, scores + 2 * AMX_ROWS, KEY_BYTES);
        _tile_stored(3, scores + 3 * AMX_ROWS, KEY_BYTES);
    }
}

// Add values to N squares of sums, 16 dimensions each.
template <int N>
INLINE void mix_squares(
    float *sums, int64_t width, const bf16 *shares, const uint32_t *values, int64_t steps) {
    const int64_t bytes = width * sizeof(float);
    _tile_loadd(0, sums, bytes);
    if constexpr (N > 1) _tile_loadd(1, sums + AMX_ROWS, bytes);
    if constexpr (N > 2) _tile_loadd(2, sums + 2 * AMX_ROWS, bytes);
    if constexpr (N > 3) _tile_loadd(3, sums + 3 * AMX_ROWS, bytes);
    for (int64_t step = 0; step < steps; ++step, values += AMX_ROWS * width) {
        _tile_loadd(4, shares + step * STEP, KEYS * sizeof(bf16));
        _tile_loadd(6, values, bytes);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (N > 1) {
            _tile_loadd(7, values + AMX_ROWS, bytes);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (N > 2) {
            _tile_loadd(6, values + 2 * AMX_ROWS, bytes);
            _tile_dpbf16ps(2, 4, 6);
        }
        if constexpr (N > 3) {
            _tile_loadd(7, values + 3 * AMX_ROWS, bytes);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, sums, bytes);
    if constexpr (N > 1) _tile_stored(1, sums + AMX_ROWS, bytes);
    if constexpr (N > 2) _tile_stored(2, sums + 2 * AMX_ROWS, bytes);
    if constexpr (N > 3) _tile_stored(3, sums + 3 * AMX_ROWS, bytes);
}

// Add values (steps * SQUARE pairs of keys, width) by their shares (queries, KEYS) to the sums
// (queries, width) of a tile of queries.
INLINE void mix_amx(
    float *sums, int64_t width, const bf16 *shares, const uint32_t *values, int64_t steps) {
    AmxTiles::written();
    int64_t left = width / AMX_ROWS;
    for (; left >= 4; left -= 4, sums += 4 * AMX_ROWS, values += 4 * AMX_ROWS)
        mix_squares<4>(sums, width, shares, values, steps);
    switch (left) {
        case 3: mix_squares<3>(sums, width, shares, values, steps); break;
        case 2: mix_squares<2>(sums, width, shares, values, steps); break;
        case 1: mix_squares<1>(sums, width, shares, values, steps); break;
        default: break;
    }
    AmxTiles::written();
}

// Multiply what some queries have summed (queries, width) by what becomes of it, and fill up the
// steps of keys in their shares (queries, KEYS).
INLINE void ready_sums(
    float *sums, int64_t width, bf16 *shares, int64_t queries, const KeyBlock &block,
    const float *kept) {
    for (int64_t r = 0; r < queries; ++r, sums += width, shares += KEYS) {
        for (int64_t d = 0; kept[r] != 1.0f && d < width; d += LANES)
            store(sums + d, mul(load(sums + d), splat(kept[r])));
        // What a step has beyond the keys weighs nothing.
        if (block.vectors() % 2) store(shares + block.vectors() * LANES, zeros());
    }
}

// Queries `first` to `last` - 1 of the task's, all of one head, meet a block that is laid out.
static void attend_amx(
    const AttentionCall &call, const AttentionTask &task, int64_t head, int64_t first, int64_t last,
    const KeyBlock &block, AttentionScratch<bf16> &room, AmxTiles &squares) {
    const int64_t steps = ceil_div(block.until, STEP), pairs = ceil_div(block.until, 2);
    std::memset(
        room.values + pairs * room.width, 0,
        (steps * AMX_ROWS - pairs) * room.width * sizeof(uint32_t));
    const int64_t before = head * task.queries * call.shape.queries_per_head;
    AmxTiles::written();
    const auto score = [&](int64_t query) {
        const int64_t height = last - query < AMX_ROWS ? last - query : AMX_ROWS;
        squares.shape(height, height);
        scores_amx(room.queries_transposed + (before + query) * room.square_words, block, room);
        return height;
    };
    int64_t height = score(first);
    for (int64_t query = first; query < last; query += AMX_ROWS) {
        float *sums = room.sums + (before + query) * room.width;
        float kept[AMX_ROWS];
        softmax_weights_all(
            call, task, query, static_cast<int>(height), block, room.scores[0],
            room.top + before + query, room.mass + before + query, room.shares[0], kept);
        room.step();
        ready_sums(sums, room.width, room.shares[0], height, block, kept);
        // Squares wait for what has just been written, so others are computed in between.
        const int64_t here = height;
        if (query + AMX_ROWS < last) height = score(query + AMX_ROWS);
        squares.shape(here, here);
        mix_amx(sums, room.width, room.shares[0], room.values, steps);
        room.step();
    }
}

#endif

}  // namespace ISA_NS
