// A task of few queries on AMX: the keys of all its heads are read where they lie.
//
// Sixteen keys as the cache has them, by the queries turned, are a square of scores: the products
// that amx_attention.h has the other way around, added in the same order, so with the same bits.
// A decode step reads more than it computes, so pages are gone through once and as they lie, all
// heads of one before the next, and the memory is asked for each a few pages before.

#pragma once

#include "amx.h"
#include "amx_attention.h"
#include "attention.h"
#include "attention_block.h"
#include "fp8.h"
#include "layout.h"
#include "simd.h"
#include "team.h"

namespace ISA_NS {

#if ANTIPHON_AMX

// Queries of a head are the columns of one tile.
INLINE bool is_small_m(const AttentionCall &call, const AttentionTask &task) {
    return call.shape.dtype == Dtype::bf16 && !call.shape.bidirectional &&
        task.queries * call.shape.queries_per_head <= AMX_ROWS;
}

// What such a task works in, cut from the thread's scratch memory.
struct SmallMScratch {
    int64_t queries, columns;      // of a head; in whole fours, as scores are turned
    int64_t words, width;          // of a head, in whole steps; of a row of sums, in whole vectors
    uint32_t *queries_transposed;  // (heads, words, SQUARE) queries, turned
    float *squares;                // (2, heads, SQUARE keys, SQUARE queries) scores of two squares
    float *scores;                 // (heads, columns, KEYS)
    bf16 *shares;                  // (heads, queries, KEYS)
    bf16 *copies;                  // (SQUARE, 2 * words) keys that cannot be read in place
    uint32_t *values;              // (2, SQUARE pairs of keys, width) of two steps
    bf16 *zero_row;                // (2 * words,) zeros, read instead of keys that are out of range
    float *sums;                   // (heads, queries, width)
    float *top, *mass;             // (heads, queries) running maximum and sum
    int64_t offsets[2][KEYS];  // of a block's tokens in the cache, in values; -1: not to be read

    SmallMScratch(Scratch &scratch, const AttentionCall &call, const AttentionTask &task) {
        const int64_t size = call.shape.head_size, heads = task.heads;
        queries = task.queries * call.shape.queries_per_head;
        columns = ceil_div(queries, 4) * 4;
        words = ceil_div(size, STEP) * AMX_ROWS;
        width = ceil_div(size, LANES) * LANES;
        const int64_t rows = ceil_div(heads * queries, LANES) * LANES;
        int64_t total = 0;
        const auto reserve = [&](int64_t size) { return std::exchange(total, total + size); };
        const int64_t asked_at = reserve(heads * words * AMX_ROWS);
        const int64_t squares_at = reserve(2 * heads * AMX_ROWS * AMX_ROWS);
        const int64_t scores_at = reserve(heads * columns * KEYS);
        const int64_t shares_at = reserve(rows * KEYS / 2);
        const int64_t copies_at = reserve(AMX_ROWS * words);
        const int64_t values_at = reserve(2 * AMX_ROWS * width);
        const int64_t nothing_at = reserve(words);
        const int64_t sums_at = reserve(rows * width);
        const int64_t top_at = reserve(rows), mass_at = reserve(rows);
        auto *at = static_cast<uint32_t *>(scratch.reserve(total * sizeof(uint32_t)));
        queries_transposed = at + asked_at;
        squares = reinterpret_cast<float *>(at + squares_at);
        scores = reinterpret_cast<float *>(at + scores_at);
        shares = reinterpret_cast<bf16 *>(at + shares_at);
        copies = reinterpret_cast<bf16 *>(at + copies_at);
        values = at + values_at;
        zero_row = reinterpret_cast<bf16 *>(at + nothing_at);
        sums = reinterpret_cast<float *>(at + sums_at);
        top = reinterpret_cast<float *>(at + top_at);
        mass = reinterpret_cast<float *>(at + mass_at);
        std::memset(zero_row, 0, words * sizeof(uint32_t));
        std::memset(sums, 0, rows * width * sizeof(float));
        std::memset(mass, 0, rows * sizeof(float));
        for (int64_t i = 0; i < rows; ++i) top[i] = LOWEST;
        // Columns beyond the head are read, and so must hold numbers.
        if (width != size) std::memset(values, 0, 2 * AMX_ROWS * width * sizeof(uint32_t));
    }
};

// Tiles 0 to 3 are sums, 4 the shares that 6 and 7, values, are multiplied by; 5 is a square of
// scores, of keys in 6 and queries in 7. K is what keys and values are kept as.
template <class K> class SmallMAttention {
  public:
    SmallMAttention(const AttentionCall &call, const AttentionTask &task, SmallMScratch &room)
        : call_(call),
          task_(task),
          room_(room),
          bases_(call, task),
          ahead_(ahead_of(call, task)),
          size_(call.shape.head_size) {
        squares_.shape_for_small_m(room.queries);
        for (int64_t head = 0; head < task.heads; ++head) turn_queries(head);
    }

    // Meet a block whose tokens lie at `offsets`; after it come those at `coming`. Queries that see
    // nothing of it meet it too, with no weight.
    void meet(const KeyBlock &block, const int64_t *offsets, const int64_t *coming) {
        const int64_t squares = ceil_div(block.until, AMX_ROWS);
        ahead_.begin(
            {bases_.keys, offsets + TOKENS_AHEAD, squares * AMX_ROWS - TOKENS_AHEAD},
            {bases_.values, offsets, block.until}, {bases_.keys, coming, TOKENS_AHEAD});
        for (int64_t i = 0; i < squares; ++i) {
            for (int64_t head = 0; head < task_.heads; ++head)
                score(head, offsets + i * AMX_ROWS, square_of(i, head));
            // Squares wait for what has just been written, so others are computed in between.
            if (i > 0) turn_scores(i - 1);
        }
        turn_scores(squares - 1);
        for (int64_t head = 0; head < task_.heads; ++head) weigh_head(head, block);
        const int64_t count = ceil_div(block.until, STEP) * task_.heads;
        for (int64_t i = 0; i < count; ++i) {
            lay_values(i % task_.heads, offsets + i / task_.heads * STEP, values_of(i));
            if (i > 0) mix(i - 1);
        }
        mix(count - 1);
    }

  private:
    // How many tokens ahead the memory is asked.
    static constexpr int64_t TOKENS_AHEAD = 3 * AMX_ROWS;
    // Half of what a step of a square of scores reads.
    static constexpr int64_t LINES = AMX_ROWS * STEP * sizeof(K) / TokenPrefetcher::LINE / 2;

    float *square_of(int64_t i, int64_t head) const {
        return room_.squares + (i % 2 * task_.heads + head) * AMX_ROWS * AMX_ROWS;
    }
    uint32_t *values_of(int64_t i) const { return room_.values + i % 2 * AMX_ROWS * room_.width; }

    void turn_queries(int64_t head) const {
        const bf16 *rows[LANES];
        for (int64_t i = 0; i < LANES; ++i)
            rows[i] = i < room_.queries ? query_at<bf16>(call_, task_, head, i) : room_.zero_row;
        const int64_t words = size_ / 2;
        uint32_t *to = room_.queries_transposed + head * room_.words * AMX_ROWS;
        transpose<bf16>(rows, words, to, AMX_ROWS);
        std::memset(to + words * AMX_ROWS, 0, (room_.words - words) * AMX_ROWS * sizeof(uint32_t));
    }

    const K *find(const char *base, int64_t head, int64_t offset) const {
        const char *at = offset < 0 ? reinterpret_cast<const char *>(room_.zero_row)
                                    : base + (head * size_ + offset) * sizeof(K);
        return reinterpret_cast<const K *>(at);
    }

    // Sixteen keys are read where they lie if all are there, at one distance, in whole steps.
    bool in_place(const int64_t *offsets) const {
        return !IN_BYTES<K> && offsets[0] >= 0 && offsets[AMX_ROWS - 1] >= 0 &&
            call_.shape.page_tokens % AMX_ROWS == 0 && size_ % STEP == 0;
    }

    void copy_keys(int64_t head, const int64_t *offsets) const {
        bf16 *to = room_.copies;
        for (int64_t i = 0; i < AMX_ROWS; ++i, to += 2 * room_.words) {
            copy_key(find(bases_.keys, head, offsets[i]), to);
            std::memset(to + size_, 0, (2 * room_.words - size_) * sizeof(bf16));
        }
    }

    void copy_key(const K *key, bf16 *to) const {
        if constexpr (!IN_BYTES<K>) {
            std::memcpy(to, key, size_ * sizeof(bf16));
        } else {
            int64_t d = 0;
            for (; d + 2 * LANES <= size_; d += 2 * LANES) {
                const auto *codes = reinterpret_cast<const __m256i *>(key + d);
                store_int(to + d, widen_codes<K>(_mm256_loadu_si256(codes)));
            }
            for (; d < size_; ++d) to[d] = widened(key[d]);
        }
    }

    // A head's scores of the sixteen keys that lie at `offsets`.
    void score(int64_t head, const int64_t *offsets, float *square) {
        const void *keys = room_.copies;
        int64_t bytes = room_.words * sizeof(uint32_t);
        if (in_place(offsets)) {
            keys = find(bases_.keys, head, offsets[0]);
            bytes = call_.shape.heads * size_ * sizeof(K);
        } else {
            copy_keys(head, offsets);
        }
        const auto *words = static_cast<const char *>(keys);
        const uint32_t *queries = room_.queries_transposed + head * room_.words * AMX_ROWS;
        AmxTiles::written();
        _tile_zero(5);
        for (int64_t word = 0; word < room_.words; word += AMX_ROWS) {
            ahead_.step<_MM_HINT_T1>(LINES);
            _tile_loadd(6, words + word * sizeof(uint32_t), bytes);
            ahead_.step<_MM_HINT_T1>(LINES);
            _tile_loadd(7, queries + word * AMX_ROWS, AMX_ROWS * sizeof(uint32_t));
            _tile_dpbf16ps(5, 6, 7);
        }
        _tile_stored(5, square, AMX_ROWS * sizeof(float));
        AmxTiles::written();
    }

    // The scores of all heads' `i`-th squares, a row a query.
    void turn_scores(int64_t i) const {
        for (int64_t head = 0; head < task_.heads; ++head) {
            const float *rows[LANES];
            for (int row = 0; row < LANES; ++row) rows[row] = square_of(i, head) + row * AMX_ROWS;
            float *to = room_.scores + head * room_.columns * KEYS + i * AMX_ROWS;
            transpose<float>(rows, room_.columns, reinterpret_cast<uint32_t *>(to), KEYS);
        }
    }

    void weigh_head(int64_t head, const KeyBlock &block) const {
        const int64_t row = head * room_.queries;
        bf16 *shares = room_.shares + row * KEYS;
        float kept[AMX_ROWS];
        softmax_weights_all(
            call_, task_, 0, static_cast<int>(room_.queries), block,
            room_.scores + head * room_.columns * KEYS, room_.top + row, room_.mass + row, shares,
            kept);
        ready_sums(room_.sums + row * room_.width, room_.width, shares, room_.queries, block, kept);
    }

    // A head's values of a step, in pairs of keys.
    void lay_values(int64_t head, const int64_t *offsets, uint32_t *to) {
        const int64_t bytes = 2 * size_ * sizeof(K), lines = ceil_div(bytes, TokenPrefetcher::LINE);
        for (int64_t i = 0; i < STEP; i += 2, to += room_.width) {
            ahead_.step<_MM_HINT_T1>(lines);
            lay_rows<bf16>(
                find(bases_.values, head, offsets[i]), find(bases_.values, head, offsets[i + 1]),
                size_, to);
        }
    }

    // Add the values that were laid out as the block's `i`-th to the sums of their head.
    void mix(int64_t i) const {
        const int64_t row = i % task_.heads * room_.queries, step = i / task_.heads;
        mix_amx(
            room_.sums + row * room_.width, room_.width, room_.shares + row * KEYS + step * STEP,
            values_of(i), 1);
    }

    const AttentionCall &call_;
    const AttentionTask &task_;
    SmallMScratch &room_;
    const TaskBases bases_;
    TokenPrefetcher ahead_;
    const int64_t size_;
    AmxTiles squares_;
};

static void attend_small_m(
    const AttentionCall &call, const AttentionTask &task, const AttentionTask *following) {
    static thread_local Scratch scratch;
    SmallMScratch room(scratch, call, task);
    by_cache_format<bf16>(call.shape, [&](auto kept) {
        SmallMAttention<decltype(kept)> few(call, task, room);
        through_blocks<bf16>(
            call, task, following, room.offsets,
            [&](const KeyBlock &block, const int64_t *offsets, const int64_t *coming) {
                few.meet(block, offsets, coming);
            });
    });
    write_out<bf16>(call, task, room.sums, room.width, room.mass);
}

#else

INLINE bool is_small_m(const AttentionCall &, const AttentionTask &) { return false; }
static void attend_small_m(const AttentionCall &, const AttentionTask &, const AttentionTask *) {}

#endif

}  // namespace ISA_NS
