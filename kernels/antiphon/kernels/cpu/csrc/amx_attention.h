// Queries meet a block of keys on AMX: scores and sums in squares of 16 queries (amx.h).
//
// Sixteen words of a head by sixteen keys, as the cache has them, are a tile, and so are sixteen words
// of keys by sixteen dimensions. One query alone is computed so too, and has the same bits.

#pragma once

#include "amx.h"
#include "attention_block.h"
#include "kv_block.h"
#include "layout.h"
#include "simd.h"

namespace ISA_NS {

#if ANTIPHON_AMX

// Put a task's queries one below the other, in whole steps.
INLINE void gather_queries(
    const AttentionCall &call, const AttentionTask &task, AttentionScratch<bf16> &room) {
    uint32_t *to = room.queries_transposed;
    for (int64_t i = 0; i < room.queries; ++i, to += room.square_words)
        std::memcpy(to, query_at<bf16>(call, task, i), call.shape.head_size * sizeof(bf16));
}

// The scores of all keys of the block, four squares of them at a time.
INLINE void scores_amx(
    const uint32_t *queries, const KeyBlock &block, AttentionScratch<bf16> &room) {
    const int64_t words = room.square_words, stride = room.head.key_stride;
    const int64_t key_bytes = stride * sizeof(uint32_t), query_bytes = words * sizeof(uint32_t);
    for (int64_t key = 0; key < block.until; key += 4 * AMX_ROWS) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        const uint32_t *const *keys = room.head.keys + key / LANES;
        for (int64_t word = 0; word < words; word += AMX_ROWS) {
            room.ahead.step();
            _tile_loadd(4, queries + word, query_bytes);
            _tile_loadd(6, keys[0] + word * stride, key_bytes);
            _tile_dpbf16ps(0, 4, 6);
            room.ahead.step();
            _tile_loadd(7, keys[1] + word * stride, key_bytes);
            _tile_dpbf16ps(1, 4, 7);
            room.ahead.step();
            _tile_loadd(6, keys[2] + word * stride, key_bytes);
            _tile_dpbf16ps(2, 4, 6);
            room.ahead.step();
            _tile_loadd(7, keys[3] + word * stride, key_bytes);
            _tile_dpbf16ps(3, 4, 7);
        }
        constexpr int64_t SCORE_BYTES = KEYS * sizeof(float);
        float *scores = room.scores[0] + key;
        _tile_stored(0, scores, SCORE_BYTES);
        _tile_stored(1, scores + AMX_ROWS, SCORE_BYTES);
        _tile_stored(2, scores + 2 * AMX_ROWS, SCORE_BYTES);
        _tile_stored(3, scores + 3 * AMX_ROWS, SCORE_BYTES);
    }
}

// Add values to N squares of sums, 16 dimensions each, from `column` on.
template <int N>
INLINE void mix_squares(
    float *sums, int64_t column, const bf16 *shares, int64_t steps, AttentionScratch<bf16> &room) {
    const int64_t width = room.width;
    BlockPrefetcher &ahead = room.ahead;
    sums += column;
    const int64_t bytes = width * sizeof(float);
    _tile_loadd(0, sums, bytes);
    if constexpr (N > 1) _tile_loadd(1, sums + AMX_ROWS, bytes);
    if constexpr (N > 2) _tile_loadd(2, sums + 2 * AMX_ROWS, bytes);
    if constexpr (N > 3) _tile_loadd(3, sums + 3 * AMX_ROWS, bytes);
    for (int64_t step = 0; step < steps; ++step) {
        const uint32_t *values = room.head.values[step * AMX_ROWS] + column;
        ahead.step();
        _tile_loadd(4, shares + step * STEP, KEYS * sizeof(bf16));
        _tile_loadd(6, values, bytes);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (N > 1) {
            ahead.step();
            _tile_loadd(7, values + AMX_ROWS, bytes);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (N > 2) {
            ahead.step();
            _tile_loadd(6, values + 2 * AMX_ROWS, bytes);
            _tile_dpbf16ps(2, 4, 6);
        }
        if constexpr (N > 3) {
            ahead.step();
            _tile_loadd(7, values + 3 * AMX_ROWS, bytes);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, sums, bytes);
    if constexpr (N > 1) _tile_stored(1, sums + AMX_ROWS, bytes);
    if constexpr (N > 2) _tile_stored(2, sums + 2 * AMX_ROWS, bytes);
    if constexpr (N > 3) _tile_stored(3, sums + 3 * AMX_ROWS, bytes);
}

// Add the block's values by their shares (queries, KEYS) to the sums (queries, width) of a tile of
// queries.
INLINE void mix_amx(
    float *sums, const bf16 *shares, int64_t steps, AttentionScratch<bf16> &room) {
    AmxTiles::written();
    int64_t column = 0;
    for (; column + 4 * AMX_ROWS <= room.width; column += 4 * AMX_ROWS)
        mix_squares<4>(sums, column, shares, steps, room);
    switch ((room.width - column) / AMX_ROWS) {
        case 3: mix_squares<3>(sums, column, shares, steps, room); break;
        case 2: mix_squares<2>(sums, column, shares, steps, room); break;
        case 1: mix_squares<1>(sums, column, shares, steps, room); break;
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

// Queries `first` to `last` - 1 of the task's meet a block.
static void attend_amx(
    const AttentionCall &call, const AttentionTask &task, int64_t first, int64_t last,
    const KeyBlock &block, AttentionScratch<bf16> &room, AmxTiles &squares) {
    const int64_t steps = ceil_div(block.until, STEP);
    AmxTiles::written();
    const auto score = [&](int64_t query) {
        const int64_t height = last - query < AMX_ROWS ? last - query : AMX_ROWS;
        squares.shape(height, height);
        scores_amx(room.queries_transposed + query * room.square_words, block, room);
        return height;
    };
    int64_t height = score(first);
    for (int64_t query = first; query < last; query += AMX_ROWS) {
        float *sums = room.sums.values + query * room.width;
        float kept[AMX_ROWS];
        softmax_weights_all(
            call, task, query, static_cast<int>(height), block, room.scores[0],
            room.sums.top + query, room.sums.mass + query, room.shares[0], kept);
        ready_sums(sums, room.width, room.shares[0], height, block, kept);
        // Squares wait for what has just been written, so others are computed in between.
        const int64_t here = height;
        if (query + AMX_ROWS < last) height = score(query + AMX_ROWS);
        squares.shape(here, here);
        mix_amx(sums, room.shares[0], steps, room);
    }
}

#endif

}  // namespace ISA_NS
