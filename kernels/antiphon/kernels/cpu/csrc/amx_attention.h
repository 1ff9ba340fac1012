// Queries attend to a block of keys on AMX: scores and sums in tiles of 16 queries (amx.h).
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

// From a query's scores to the next one's, and so from its weights.
static constexpr int64_t SCORE_BYTES = KEYS * sizeof(float);

// Put a task's queries one below the other, in whole steps.
INLINE void gather_queries(
    const AttentionCall &call, const AttentionTask &task, AttentionScratch<bf16> &room) {
    uint32_t *to = room.queries_transposed;
    for (int64_t i = 0; i < room.queries; ++i, to += room.padded_words)
        std::memcpy(to, query_at<bf16>(call, task, i), call.shape.head_size * sizeof(bf16));
}

// The scores of all keys of the block, four AMX tiles of them at a time.
INLINE void score_tile(
    const uint32_t *queries, const KeyBlock &block, AttentionScratch<bf16> &room) {
    const int64_t words = room.padded_words, stride = room.head.key_stride;
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
        float *scores = room.scores[0] + key;
        _tile_stored(0, scores, SCORE_BYTES);
        _tile_stored(1, scores + AMX_ROWS, SCORE_BYTES);
        _tile_stored(2, scores + 2 * AMX_ROWS, SCORE_BYTES);
        _tile_stored(3, scores + 3 * AMX_ROWS, SCORE_BYTES);
    }
}

// Add weighted values to N AMX tiles of sums, 16 dimensions each, from `column` on.
template <int N>
INLINE void add_values(float *sums, int64_t column, int64_t steps, AttentionScratch<bf16> &room) {
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
        _tile_loadd(4, room.weights_of(0) + step * STEP, SCORE_BYTES);
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

// Add the block's values by their weights to the sums (queries, width) of a tile of queries.
INLINE void add_values_of_tile(float *sums, int64_t steps, AttentionScratch<bf16> &room) {
    int64_t column = 0;
    for (; column + 4 * AMX_ROWS <= room.width; column += 4 * AMX_ROWS)
        add_values<4>(sums, column, steps, room);
    switch ((room.width - column) / AMX_ROWS) {
        case 3: add_values<3>(sums, column, steps, room); break;
        case 2: add_values<2>(sums, column, steps, room); break;
        case 1: add_values<1>(sums, column, steps, room); break;
        default: break;
    }
}

// Multiply what some queries have summed (queries, width) by their `rescale`, and fill up the steps
// of keys in their weights.
INLINE void rescale_sums(
    float *sums, int64_t queries, const KeyBlock &block, AttentionScratch<bf16> &room,
    const float *rescale) {
    for (int64_t r = 0; r < queries; ++r, sums += room.width) {
        for (int64_t d = 0; rescale[r] != 1.0f && d < room.width; d += LANES)
            store(sums + d, mul(load(sums + d), splat(rescale[r])));
        // What a step has beyond the keys weighs nothing.
        if (block.vectors() % 2) store(room.weights_of(r) + block.vectors() * LANES, zeros());
    }
}

// Queries `first` to `last` - 1 of the task's attend to a block, a tile after the other. No tile is
// multiplied while weights are made of scores: a core that multiplies tiles has half of its vector
// units (ADR 40).
static void attend_amx(
    const AttentionCall &call, const AttentionTask &task, int64_t first, int64_t last,
    const KeyBlock &block, AttentionScratch<bf16> &room, AmxTiles &amx) {
    for (; first < last; first += AMX_ROWS) {
        const auto height = static_cast<int>(last - first < AMX_ROWS ? last - first : AMX_ROWS);
        float *sums = room.sums.values + first * room.width;
        alignas(64) float rescale[LANES];
        amx.shape(height, height);
        AmxTiles::written();
        score_tile(room.queries_transposed + first * room.padded_words, block, room);
        AmxTiles::written();
        softmax_weights(call, task, first, height, block, room, rescale);
        rescale_sums(sums, height, block, room, rescale);
        AmxTiles::written();
        add_values_of_tile(sums, ceil_div(block.until, STEP), room);
        AmxTiles::written();
    }
}

#endif

}  // namespace ISA_NS
