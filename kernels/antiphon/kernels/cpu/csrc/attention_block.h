// Attention over a paged cache, for any number of queries: prefill, decode and verify are one.
//
// Keys are taken in blocks of BLOCK_KEYS, counted from position 0, and every query goes through the
// blocks in that order with the running maximum and sum of an online softmax. A block is laid out
// first: keys transposed, so that a lane is a key and its product with a query is one accumulator,
// dimensions ascending; values in pairs of keys, so that a lane is a dimension and its sum is one
// accumulator, keys ascending. A query's bits therefore depend on its own keys alone, however many
// queries and heads share the block; and one code serves a decode row, a chunk and a whole prompt.
//
// Here a tile of queries meets one block; attention.h goes through the blocks.
//
// Source of the online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867.

#pragma once

#include "amx.h"
#include "fp8.h"
#include "gemm.h"
#include "layout.h"
#include "simd.h"
#include "team.h"

namespace ISA_NS {

// On squares a block is twice as long: sums are taken up and put down once a block.
static constexpr int KEYS = ANTIPHON_AMX ? 128 : 64;
template <class T> static constexpr int BLOCK_KEYS = USES_AMX<T> ? KEYS : 64;
static constexpr int KEY_VECTORS = KEYS / LANES;
// A register tile: so many queries by so many vectors.
static constexpr int TILE_QUERIES = ANTIPHON_AVX512 ? 6 : 2;
static constexpr int TILE_VECTORS = ANTIPHON_AVX512 ? 4 : 2;
// How many queries a tile may have, on squares too.
static constexpr int ROOM_QUERIES = TILE_QUERIES > AMX_ROWS ? TILE_QUERIES : AMX_ROWS;
// How often, a block and head, the memory is asked for what comes next.
static constexpr int AHEAD_STEPS = 2 * KEY_VECTORS + 2;
// Below any score, and still finite, so that what was never seen has no weight and no NaN.
static constexpr float LOWEST = -1e30f;
static constexpr float LOG2_E = 1.44269504088896341f;

// Positions of a row, [from, until).
struct PositionRange {
    int64_t from, until;
};

// What the query at a position sees of its row.
INLINE PositionRange
seen_from(const AttentionCall &call, const AttentionTask &task, int64_t position) {
    const int64_t window = call.shape.window;
    const int64_t from = window && position >= window ? position + 1 - window : 0;
    if (!call.shape.bidirectional) return {from, position + 1};
    const int64_t end = call.rows.kv_len[task.row];
    return {from, window && position + window < end ? position + window : end};
}

// The keys of a block that any query may attend to, [begin + from, begin + until).
struct KeyBlock {
    int64_t begin;
    int from, until;

    int vectors() const { return (until + LANES - 1) / LANES; }
};

// Asks the memory for tokens to come, a few lines at a time between the sums of what is there: the
// pages lie apart, so the hardware does not see where it goes on, and it holds few questions.
class TokenPrefetcher {
  public:
    static constexpr int64_t LINE = 64;

    // Tokens of keys or of values, by where they lie from their base on; -1: nothing is read.
    struct Run {
        const void *base;
        const int64_t *offsets;
        int64_t tokens;
    };

    // Of each token `bytes` are read, in values of `item` bytes.
    TokenPrefetcher(int64_t bytes, int64_t item) : bytes_(bytes), item_(item) {}

    // From now on, ask for these.
    void begin(const Run &first, const Run &second, const Run &third) {
        runs_ = {first, second, third};
        run_ = token_ = 0;
        at_ = end_ = nullptr;
    }

    int64_t lines(int64_t tokens) const { return tokens * ceil_div(bytes_, LINE); }

    // Ask for so many lines: into the first level of caches, or into the second.
    template <PrefetchHint LEVEL>
    __attribute__((always_inline)) void step(int64_t lines) {
        for (; lines > 0 && (at_ < end_ || next_token()); --lines, at_ += LINE)
            _mm_prefetch(at_, LEVEL);
        // GCC takes a function that does nothing else for one that does nothing.
        __asm__ volatile("" ::: "memory");
    }

  private:
    bool next_token() {
        for (; run_ < runs_.size(); ++run_, token_ = 0) {
            const Run &run = runs_[run_];
            while (token_ < run.tokens) {
                const int64_t offset = run.offsets[token_++];
                if (offset < 0) continue;
                at_ = static_cast<const char *>(run.base) + offset * item_;
                end_ = at_ + bytes_;
                return true;
            }
        }
        return false;
    }

    int64_t bytes_, item_;
    std::array<Run, 3> runs_ = {};
    size_t run_ = 0;
    int64_t token_ = 0;
    const char *at_ = nullptr, *end_ = nullptr;
};

// What one task works in, cut from the thread's scratch memory.
template <class T> struct AttentionScratch {
    int64_t words, width;          // words of a head; columns of a row of sums, whole vectors
    uint32_t *keys;                // (words, KEYS)
    uint32_t *values;              // (KEYS / WORD_VALUES, width)
    float *sums;                   // (queries of all heads, width)
    float *top, *mass;             // (queries of all heads,) running maximum and sum
    T *zero_row;                   // (H, D) zeros, read instead of keys that are out of range
    uint32_t *queries_transposed;  // (queries of all heads, square_words) for squares alone
    int64_t square_words;          // words of a head, whole steps of a square
    alignas(64) float scores[ROOM_QUERIES][KEYS];
    alignas(64) T shares[ROOM_QUERIES][KEYS];
    // Offsets of a block's tokens in the cache, in values; -1 for those that must not be read.
    int64_t offsets[2][KEYS];
    TokenPrefetcher ahead;
    int64_t lines_ahead;  // that are asked for at a time

    AttentionScratch(
        Scratch &scratch, const AttentionCall &call, const AttentionTask &task,
        const TokenPrefetcher &ahead)
        : ahead(ahead), lines_ahead(ceil_div(ahead.lines(2 * KEYS), AHEAD_STEPS * task.heads)) {
        const CacheShape &shape = call.shape;
        const int64_t queries = task.heads * task.queries * shape.queries_per_head;
        words = shape.head_size / WORD_VALUES<T>;
        width = ceil_div(shape.head_size, LANES) * LANES;
        const int64_t padded = ceil_div(queries, LANES) * LANES;
        square_words = ceil_div(words, AMX_ROWS) * AMX_ROWS;
        const int64_t sizes[] = {
            square_words * KEYS,
            KEYS / WORD_VALUES<T> * width,
            padded * width,
            padded,
            padded,
            ceil_div(shape.heads * words, LANES) * LANES,
            USES_AMX<T> ? padded * square_words : 0};
        int64_t total = 0;
        for (const int64_t size : sizes) total += size;
        auto *at = static_cast<uint32_t *>(scratch.reserve(total * sizeof(uint32_t)));
        keys = at;
        values = keys + sizes[0];
        sums = reinterpret_cast<float *>(values + sizes[1]);
        top = sums + sizes[2];
        mass = top + sizes[3];
        zero_row = reinterpret_cast<T *>(mass + sizes[4]);
        queries_transposed = reinterpret_cast<uint32_t *>(zero_row) + sizes[5];
        // Columns beyond the head are read, and so must hold numbers.
        if (width != shape.head_size) std::memset(values, 0, sizes[1] * sizeof(uint32_t));
        std::memset(keys + words * KEYS, 0, (square_words - words) * KEYS * sizeof(uint32_t));
        const int64_t others = sizes[2] + sizes[3] + sizes[4] + sizes[5] + sizes[6];
        std::memset(sums, 0, others * sizeof(float));
        for (int64_t i = 0; i < padded; ++i) top[i] = LOWEST;
    }

    // Into the second level: a block of all heads has 48 KiB and more, and would drive itself out of
    // the first. On squares many queries share a block, and few ask otherwise (amx_small_m.h).
    void step() { ahead.step<USES_AMX<T> ? _MM_HINT_T0 : _MM_HINT_T1>(lines_ahead); }
};

// Where the tokens of a block lie in the cache.
INLINE void token_offsets(
    const AttentionCall &call, int32_t row, const KeyBlock &block, int64_t (&offsets)[KEYS]) {
    const int64_t size = call.shape.page_tokens;
    const int64_t token = call.shape.heads * call.shape.head_size;
    const int32_t *table = call.rows.tables + row * call.rows.stride;
    for (int i = 0; i < block.from; ++i) offsets[i] = -1;
    int64_t page = (block.begin + block.from) / size;
    int64_t inside = (block.begin + block.from) % size;
    for (int i = block.from; i < block.until; ++page, inside = 0)
        for (int64_t at = (table[page] * size + inside) * token; inside < size && i < block.until;
             ++i, ++inside, at += token)
            offsets[i] = at;
    for (int i = block.until < 0 ? 0 : block.until; i < KEYS; ++i) offsets[i] = -1;
}

// Lay out one head's keys and values of a block, which are kept as K.
template <class T, class K>
INLINE void transpose_block(
    const AttentionCall &call, int64_t head, const KeyBlock &block, const int64_t *offsets,
    AttentionScratch<T> &room) {
    const int64_t size = call.shape.head_size;
    const K *zero_row =
        reinterpret_cast<const K *>(room.zero_row);  // zeros are zeros in each format
    const auto find = [&](const void *cache, int key) {
        const K *base = static_cast<const K *>(cache) + head * size;
        return offsets[key] < 0 ? zero_row : base + offsets[key];
    };
    for (int v = 0; v < block.vectors(); ++v) {
        const K *rows[LANES];
        for (int i = 0; i < LANES; ++i) rows[i] = find(call.cache.keys, v * LANES + i);
        transpose<T>(rows, room.words, room.keys + v * LANES, KEYS);
        room.step();
    }
    constexpr int step = WORD_VALUES<T>;
    for (int key = 0; key < block.until; key += step) {
        if (key % LANES == 0) room.step();
        lay_rows<T>(
            find(call.cache.values, key), find(call.cache.values, key + step - 1), size,
            room.values + key / step * room.width);
    }
}

// acc[r] += each[r] . words, over `steps` words of a row; `words` has `stride` words a step.
template <class T, int R, int V>
INLINE void add_products(
    F32 (&acc)[R][V], const uint32_t *const (&each)[R], const uint32_t *words, int64_t stride,
    int64_t steps) {
    for (int64_t step = 0; step < steps; ++step, words += stride) {
        I32 columns[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) columns[v] = load_int(words + v * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const I32 word = splat_words(each[r] + step);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) acc[r][v] = dot_words<T>(acc[r][v], columns[v], word);
        }
    }
}

// Call `body` for all of 0 .. vectors - 1: as a constant number of vectors, and where they begin.
template <class Body> INLINE void in_tiles(int64_t vectors, Body &&body) {
    int64_t v = 0;
    for (; v + TILE_VECTORS <= vectors; v += TILE_VECTORS)
        body(std::integral_constant<int, TILE_VECTORS>(), v);
    if (TILE_VECTORS > 2 && v + 2 <= vectors) {
        body(std::integral_constant<int, 2>(), v);
        v += 2;
    }
    if (v < vectors) body(std::integral_constant<int, 1>(), v);
}

// Lanes [from, until) of 16 count: zero there, -infinity elsewhere.
INLINE F32 unseen_outside(int from, int until) {
    static constexpr float INF = __builtin_inff();
    static constexpr float EDGES[3 * LANES] = {
        -INF, -INF, -INF, -INF, -INF, -INF, -INF, -INF, -INF, -INF, -INF, -INF,
        -INF, -INF, -INF, -INF, 0,    0,    0,    0,    0,    0,    0,    0,
        0,    0,    0,    0,    0,    0,    0,    0,    -INF, -INF, -INF, -INF,
        -INF, -INF, -INF, -INF, -INF, -INF, -INF, -INF, -INF, -INF, -INF, -INF};
    const auto clamp = [](int x) { return x < 0 ? 0 : x > LANES ? LANES : x; };
    return add(load(EDGES + LANES - clamp(from)), load(EDGES + 2 * LANES - clamp(until)));
}

// 2^x for x <= 0, within 2 units in the last place; a NaN stays one. Below 2^-125 it is zero: what
// is no longer a normal number would take a hundred times as long.
INLINE F32 power_of_two(F32 x) {
    const F32 least = splat(-125.0f), within = max(least, x);
    const F32 n = round_even(within), r = sub(within, n);
    F32 p = fma(splat(1.3333558e-3f), r, splat(9.6181291e-3f));
    p = fma(p, r, splat(5.5504109e-2f));
    p = fma(p, r, splat(2.4022651e-1f));
    p = fma(p, r, splat(6.9314718e-1f));
    return zero_below(x, least, scale_by_power(fma(p, r, splat(1.0f)), n));
}

// Call `body` with a number of vectors, 1 .. KEY_VECTORS, as a constant.
template <int V = KEY_VECTORS, class Body> INLINE float by_vectors(int vectors, Body &&body) {
    if constexpr (V > 1)
        if (vectors < V) return by_vectors<V - 1>(vectors, body);
    return body(std::integral_constant<int, V>());
}

// One query's scores in V vectors become its keys' weights, rounded as they will be multiplied.
// `top` and `mass` are its running maximum, in powers of two, and sum. Returns what becomes of all
// that was summed under the old maximum.
template <class T, int V>
INLINE float softmax_weights(
    const float *scores, float scale, int from, int until, float &top, float &mass, T *shares) {
    F32 scaled[V], most = splat(top);
    for (int v = 0; v < V; ++v) {
        scaled[v] = mul(load(scores + v * LANES), splat(scale));
        if (from > v * LANES || until < (v + 1) * LANES)
            scaled[v] = add(scaled[v], unseen_outside(from - v * LANES, until - v * LANES));
        most = max(most, scaled[v]);
    }
    const float before = top, after = reduce_max(most);
    F32 total = zeros();
    for (int v = 0; v < V; ++v) {
        const F32 share = power_of_two(sub(scaled[v], splat(after)));
        store(shares + v * LANES, share);
        total = add(total, rounded<T>(share));
    }
    const float kept = before == after ? 1.0f : lane_0(power_of_two(splat(before - after)));
    top = after;
    mass = mass * kept + sum(total);
    return kept;
}

// Where one query of a head begins: the `index`-th of the task's.
template <class T>
INLINE const T *query_at(
    const AttentionCall &call, const AttentionTask &task, int64_t head, int64_t index) {
    const int64_t group = call.shape.queries_per_head;
    const T *q = static_cast<const T *>(call.q) + (task.token + index / group) * call.q_stride;
    return q + ((task.head + head) * group + index % group) * call.shape.head_size;
}

// The scores (queries, KEYS) of some queries of a head, from `first` of the task's on, become
// weights; `kept` is what becomes of what each has summed.
template <class T>
INLINE void softmax_weights_all(
    const AttentionCall &call, const AttentionTask &task, int64_t first, int queries,
    const KeyBlock &block, const float *scores, float *top, float *mass, T *shares, float *kept) {
    const int64_t group = call.shape.queries_per_head;
    for (int r = 0; r < queries; ++r, scores += KEYS, shares += KEYS) {
        const PositionRange all = seen_from(call, task, task.position + (first + r) / group);
        const int64_t seen = all.until - block.begin, unseen = all.from - block.begin;
        const int until = static_cast<int>(seen < KEYS ? seen : KEYS);
        const int from = static_cast<int>(unseen > KEYS ? KEYS : unseen < 0 ? 0 : unseen);
        const float scale = call.scale * call.cache.key_scale * LOG2_E;
        const auto weigh_in = [&](auto vectors) {
            return softmax_weights<T, vectors>(scores, scale, from, until, top[r], mass[r], shares);
        };
        kept[r] = by_vectors(block.vectors(), weigh_in);
    }
}

// R queries of one head, from `first` of the task's on, meet a block that is laid out.
template <class T, int R>
static void attend_tile(
    const AttentionCall &call, const AttentionTask &task, int64_t head, int64_t first,
    const KeyBlock &block, AttentionScratch<T> &room) {
    const uint32_t *each[R];
    for (int r = 0; r < R; ++r) each[r] = words_of(query_at<T>(call, task, head, first + r));
    in_tiles(block.vectors(), [&](auto count, int64_t v) {
        F32 acc[R][count];
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < count; ++i) acc[r][i] = zeros();
        add_products<T>(acc, each, room.keys + v * LANES, KEYS, room.words);
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < count; ++i) store(room.scores[r] + (v + i) * LANES, acc[r][i]);
    });

    room.step();
    const int64_t row = head * task.queries * call.shape.queries_per_head + first;
    float kept[R];
    softmax_weights_all(
        call, task, first, R, block, room.scores[0], room.top + row, room.mass + row,
        room.shares[0], kept);

    room.step();
    for (int r = 0; r < R; ++r) each[r] = words_of(room.shares[r]);
    in_tiles(room.width / LANES, [&](auto count, int64_t v) {
        F32 acc[R][count];
        float *sums = room.sums + row * room.width + v * LANES;
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < count; ++i)
                acc[r][i] = mul(load(sums + r * room.width + i * LANES), splat(kept[r]));
        const int64_t steps = ceil_div(block.until, WORD_VALUES<T>);
        add_products<T>(acc, each, room.values + v * LANES, room.width, steps);
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < count; ++i) store(sums + r * room.width + i * LANES, acc[r][i]);
    });
}

}  // namespace ISA_NS
