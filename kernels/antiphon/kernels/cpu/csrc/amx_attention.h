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
    const uint32_t *queries, const KeyBlock &block, AttentionScratch<bf16> &room, float *to) {
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
        float *scores = to + key;
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
INLINE void mix_amx(float *sums, const bf16 *shares, int64_t steps, AttentionScratch<bf16> &room) {
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

// Some queries of a task on their way through a block.
struct QueryTile {
    int64_t query = 0, height = 0;  // 0: none
    float *scores = nullptr;
    bf16 *shares = nullptr;
};

// What squares compute while other units make weights of a tile's scores: the scores of the tile
// after it, and the sums of the one before. A part is two squares.
class PartsBeside {
  public:
    PartsBeside(
        const QueryTile &before, const QueryTile &after, const KeyBlock &block,
        AttentionScratch<bf16> &room)
        : before_(before),
          after_(after),
          room_(room),
          steps_(ceil_div(block.until, STEP)),
          sums_(before.height ? ceil_div(room.width, PART) : 0),
          parts_(sums_ + (after.height ? ceil_div(block.until, PART) : 0)) {}

    // Do what is due after `done` of `all` queries.
    void until(int64_t done, int64_t all) {
        for (; part_ * all < parts_ * done; ++part_) {
            AmxTiles::written();
            if (part_ < sums_) mix(part_ * PART);
            else score((part_ - sums_) * PART);
            AmxTiles::written();
        }
    }

  private:
    static constexpr int64_t PART = 2 * AMX_ROWS;  // dimensions, or keys

    void score(int64_t key) {
        const int64_t words = room_.square_words, stride = room_.head.key_stride;
        const int64_t key_bytes = stride * sizeof(uint32_t), query_bytes = words * sizeof(uint32_t);
        const uint32_t *queries = room_.queries_transposed + after_.query * words;
        const uint32_t *const *keys = room_.head.keys + key / LANES;
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t word = 0; word < words; word += AMX_ROWS) {
            _tile_loadd(4, queries + word, query_bytes);
            _tile_loadd(6, keys[0] + word * stride, key_bytes);
            _tile_dpbf16ps(0, 4, 6);
            room_.ahead.step();
            _tile_loadd(6, keys[1] + word * stride, key_bytes);
            _tile_dpbf16ps(1, 4, 6);
            room_.ahead.step();
        }
        _tile_stored(0, after_.scores + key, KEYS * sizeof(float));
        _tile_stored(1, after_.scores + key + AMX_ROWS, KEYS * sizeof(float));
    }

    void mix(int64_t column) {
        const int64_t width = room_.width, bytes = width * sizeof(float);
        float *sums = room_.sums.values + before_.query * width + column;
        const bool both = column + AMX_ROWS < width;
        _tile_loadd(2, sums, bytes);
        if (both) _tile_loadd(3, sums + AMX_ROWS, bytes);
        for (int64_t step = 0; step < steps_; ++step) {
            const uint32_t *values = room_.head.values[step * AMX_ROWS] + column;
            _tile_loadd(5, before_.shares + step * STEP, KEYS * sizeof(bf16));
            _tile_loadd(7, values, bytes);
            _tile_dpbf16ps(2, 5, 7);
            room_.ahead.step();
            if (both) {
                _tile_loadd(7, values + AMX_ROWS, bytes);
                _tile_dpbf16ps(3, 5, 7);
                room_.ahead.step();
            }
        }
        _tile_stored(2, sums, bytes);
        if (both) _tile_stored(3, sums + AMX_ROWS, bytes);
    }

    const QueryTile before_, after_;
    AttentionScratch<bf16> &room_;
    const int64_t steps_, sums_, parts_;
    int64_t part_ = 0;
};

// Queries `first` to `last` - 1 of the task's meet a block, a tile after the other.
static void attend_amx(
    const AttentionCall &call, const AttentionTask &task, int64_t first, int64_t last,
    const KeyBlock &block, AttentionScratch<bf16> &room, AmxTiles &squares) {
    const auto tile_at = [&](int64_t query) {
        const int64_t left = last - query, side = (query - first) / AMX_ROWS % 2;
        if (left <= 0) return QueryTile{};
        const int64_t height = left < AMX_ROWS ? left : AMX_ROWS;
        return QueryTile{query, height, room.scores[side][0], room.shares[side][0]};
    };
    QueryTile before, tile = tile_at(first);
    AmxTiles::written();
    squares.shape(tile.height, tile.height);
    scores_amx(room.queries_transposed + first * room.square_words, block, room, tile.scores);
    while (true) {
        const QueryTile after = tile_at(tile.query + AMX_ROWS);
        if (before.height || after.height) squares.shape(after.height, before.height);
        PartsBeside parts(before, after, block, room);
        float kept[AMX_ROWS];
        softmax_weights_all(
            call, task, tile.query, static_cast<int>(tile.height), block, tile.scores,
            room.sums.top + tile.query, room.sums.mass + tile.query, tile.shares, kept,
            [&](int r) { parts.until(r + 1, tile.height); });
        float *sums = room.sums.values + tile.query * room.width;
        ready_sums(sums, room.width, tile.shares, tile.height, block, kept);
        if (!after.height) break;
        before = tile;
        tile = after;
    }
    squares.shape(tile.height, tile.height);
    mix_amx(
        room.sums.values + tile.query * room.width, tile.shares, ceil_div(block.until, STEP), room);
}

#endif

}  // namespace ISA_NS
