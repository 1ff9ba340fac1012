// Attention over a paged cache, for any number of queries: prefill, decode and verify are one.
//
// Keys are taken in blocks of BLOCK_KEYS, counted from position 0, and every query goes through the
// blocks in that order with the running maximum and sum of an online softmax. A lane is a key, and
// its product with a query is one accumulator, dimensions ascending; then a lane is a dimension, and
// its sum is one accumulator, keys ascending (kv_block.h). After a segment of keys its sums are added
// to those of the segments before. A query's bits therefore depend on its own keys alone, however
// many queries share the block and which thread computes a segment; and one code serves a decode row,
// a chunk and a whole prompt.
//
// Here a tile of queries attends to one block; attention.h goes through the blocks.
//
// Source of the online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867.

#pragma once

#include "activation.h"
#include "amx.h"
#include "gemm.h"
#include "kv_block.h"
#include "layout.h"
#include "simd.h"
#include "team.h"

namespace ISA_NS {

// A register tile: so many queries by so many vectors.
static constexpr int TILE_QUERIES = ANTIPHON_AVX512 ? 6 : 2;
static constexpr int TILE_VECTORS = ANTIPHON_AVX512 ? 4 : 2;
// How many queries a tile may have, on AMX too.
static constexpr int ROOM_QUERIES = TILE_QUERIES > AMX_ROWS ? TILE_QUERIES : AMX_ROWS;
// Below any score, and still finite, so that what was never seen has no weight and no NaN. Scores of
// 1e8 and more, which no model has, lose so many digits that their weights may exceed one.
static constexpr float LOWEST = -1e30f;
static constexpr float LOG2_E = 1.44269504088896341f;
// Of two: less than this power of it is no normal number.
static constexpr float LEAST_POWER = -125.0f;

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

// What queries have summed: rows of weighted values, and of each the running maximum and weight.
struct AttentionSums {
    float *values;  // (queries, width)
    float *top, *mass;

    // Those from a query on.
    AttentionSums from(int64_t query, int64_t width) const {
        return {values + query * width, top + query, mass + query};
    }

    void clear(int64_t queries, int64_t width) const {
        std::memset(values, 0, queries * width * sizeof(float));
        std::memset(mass, 0, queries * sizeof(float));
        for (int64_t i = 0; i < queries; ++i) top[i] = LOWEST;
    }
};

// Whether tiles widen codes of eight bits themselves, if there are few: for more of them, codes are
// widened once and put down. Without byte permutes (fp8.h) there are too few registers for it.
template <class T>
static constexpr bool TILES_WIDEN = ANTIPHON_BF16 && std::is_same_v<T, bf16> && !USES_AMX<T>;
static constexpr int WIDENING_TILES = 2;
// What a tile's words are kept as, where the cache is kept as K.
template <class T, class K> using TileWords = std::conditional_t<TILES_WIDEN<T>, K, T>;

template <class T> INLINE bool tiles_widen(const AttentionCall &call, int64_t queries) {
    const CacheShape &shape = call.shape;
    const bool lie = shape.page_tokens % LANES == 0 && shape.head_size % LANES == 0;
    return TILES_WIDEN<T> && shape.format != CacheFormat::model && call.cache.values && lie &&
        queries <= WIDENING_TILES * TILE_QUERIES;
}

// What one task works in, cut from the thread's scratch memory.
template <class T> struct AttentionScratch {
    HeadBlock<T> head;
    int64_t queries, width;     // of a head; columns of a row of sums, whole vectors
    int64_t rows;               // of the sums of a head: on AMX, whole tiles
    AttentionSums all, totals;  // of each head: the segment that is gone through, and those before
    AttentionSums sums;         // of the head that is attended to
    uint32_t *queries_transposed;  // (queries, padded_words) for AMX alone
    int64_t padded_words;          // words of a head, whole steps of AMX
    bool widen;                    // whether tiles widen what is in eight bits
    BlockPrefetcher ahead;
    alignas(64) float scores[ROOM_QUERIES][KEYS];

    // A query's weights take the place of its scores: with more room, the keys and values of a block
    // would leave the first-level cache of a core with AMX.
    T *weights_of(int64_t query) { return reinterpret_cast<T *>(scores[query]); }

    AttentionScratch(Scratch &scratch, const AttentionCall &call, const AttentionTask &task)
        : queries(task.queries * call.shape.queries_per_head),
          widen(tiles_widen<T>(call, queries)),
          ahead(call, prefetch_steps(call.shape, widen, queries)) {
        const int64_t words = call.shape.head_size / WORD_VALUES<T>;
        width = ceil_div(call.shape.head_size, LANES) * LANES;
        padded_words = ceil_div(words, AMX_ROWS) * AMX_ROWS;
        rows = USES_AMX<T> ? ceil_div(queries, AMX_ROWS) * AMX_ROWS : queries;
        const int64_t every = task.heads * rows;
        int64_t total_words = 0;
        const auto reserve = [&](int64_t size) {  // every part begins a line
            return std::exchange(total_words, total_words + ceil_div(size, LANES) * LANES);
        };
        const int64_t keys_at = reserve(padded_words * KEYS);
        const int64_t values_at = reserve(KEYS / WORD_VALUES<T> * width);
        const int64_t rows_at = reserve(call.cache.values == nullptr ? LANES * width : 0);
        const int64_t queries_at = reserve(USES_AMX<T> ? queries * padded_words : 0);
        const int64_t sums_at = reserve(every * (width + 2));
        const int64_t total_at = reserve(every * (width + 2));
        auto *at = static_cast<uint32_t *>(scratch.reserve(total_words * sizeof(uint32_t)));
        head.words = words;
        head.width = width;
        head.key_room = at + keys_at;
        head.value_room = at + values_at;
        head.row_room = at + rows_at;
        queries_transposed = at + queries_at;
        const auto sums_of = [&](int64_t begin) {
            auto *values = reinterpret_cast<float *>(at + begin);
            return AttentionSums{values, values + every * width, values + every * (width + 1)};
        };
        all = sums_of(sums_at);
        totals = sums_of(total_at);
        all.clear(every, width);
        // Columns and words beyond the head are read, and so must hold numbers.
        if (width != call.shape.head_size)
            std::memset(head.value_room, 0, (rows_at - values_at) * sizeof(uint32_t));
        std::memset(
            head.key_room + words * KEYS, 0, (padded_words - words) * KEYS * sizeof(uint32_t));
        if constexpr (USES_AMX<T>)
            std::memset(queries_transposed, 0, queries * padded_words * sizeof(uint32_t));
    }

    // In how many steps of products the memory is asked for the next block: those of one or two tiles,
    // since requests that find no fill buffer hold up loads. What is in eight bits is copied before the
    // first of them, or has so few lines that the first tile asks for them.
    static int64_t prefetch_steps(const CacheShape &shape, bool widen, int64_t queries) {
        const int64_t words = ceil_div(shape.head_size, WORD_VALUES<T>);
        const int64_t values = BLOCK_KEYS<T> / WORD_VALUES<T>;
        if (USES_AMX<T>)
            return ceil_div(words, AMX_ROWS) * (KEYS / LANES) +
                ceil_div(shape.head_size, LANES) * (KEYS / STEP);
        if (shape.format != CacheFormat::model) return widen ? words + values : words;
        const int64_t times = ceil_div(ceil_div(shape.head_size, LANES), TILE_VECTORS);
        return (queries > TILE_QUERIES ? 2 : 1) * (words + times * values);
    }
};

// acc[r] += each[r] . columns.
template <class T, int R, int V>
INLINE void add_step(
    F32 (&acc)[R][V], const uint32_t *const (&each)[R], int64_t step, const I32 (&columns)[V]) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        const I32 word = splat_words(each[r] + step);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[r][v] = dot_words<T>(acc[r][v], columns[v], word);
    }
}

// The same over `steps` words of a row; `columns_at(step, v)` is where those of sixteen lanes lie, kept
// as K.
template <class T, class K, int R, int V, class Columns>
INLINE void add_products(
    F32 (&acc)[R][V], const uint32_t *const (&each)[R], int64_t steps, BlockPrefetcher &ahead,
    Columns &&columns_at) {
    if constexpr (!IN_BYTES<K>) {
        for (int64_t step = 0; step < steps; ++step) {
            ahead.step();
            I32 columns[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) columns[v] = load_int(columns_at(step, v));
            add_step<T>(acc, each, step, columns);
        }
    } else {
        // Codes are widened two steps at a time.
        for (int64_t step = 0; step < steps; step += 2) {
            ahead.step();
            ahead.step();
            const bool both = step + 1 < steps;
            I32 columns[2][V];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                const K *first = columns_at(step, v);
                const auto widened = words_as<T>(first, both ? columns_at(step + 1, v) : first);
                columns[0][v] = widened[0];
                columns[1][v] = widened[1];
            }
            add_step<T>(acc, each, step, columns[0]);
            if (!both) break;
            add_step<T>(acc, each, step + 1, columns[1]);
        }
    }
}

// Call `body` for all of 0 .. vectors - 1: as a constant number of vectors, and where they begin.
template <int MOST, class Body> INLINE void in_tiles(int64_t vectors, Body &&body) {
    int64_t v = 0;
    for (; v + MOST <= vectors; v += MOST) body(std::integral_constant<int, MOST>(), v);
    if (MOST > 2 && v + 2 <= vectors) {
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

// 2^x for x <= 0, within 2 units in the last place of a float. Of 0 it is 1, and a NaN stays one.
// Below 2^-125 it is zero: what is no longer a normal number would take a hundred times as long.
INLINE F32 power_of_two(F32 x) {
    const F32 least = splat(LEAST_POWER), within = max(least, x);
    const F32 n = round_even(within), r = sub(within, n);
    F32 p = fma(splat(1.3333558e-3f), r, splat(9.6181291e-3f));
    p = fma(p, r, splat(5.5504109e-2f));
    p = fma(p, r, splat(2.4022651e-1f));
    p = fma(p, r, splat(6.9314718e-1f));
    return zero_below(x, least, scale_by_power(fma(p, r, splat(1.0f)), n));
}

// A key's weight, 2^x for x <= 0, as it will be multiplied: for bf16 within 9e-5 of itself, a fortieth
// of a unit, and 2^-125 for what is less. Of 0 it is 1, and a NaN stays one.
template <class T> INLINE F32 weight_of(F32 x) {
    if constexpr (!std::is_same_v<T, bf16>) return power_of_two(x);
    const F32 within = max(splat(LEAST_POWER), x), r = fraction(within);
    F32 p = fma(splat(7.706706e-2f), r, splat(2.2764498e-1f));
    p = fma(p, r, splat(6.9511679e-1f));
    return scale_by_floor(fma(p, r, splat(1.0f)), within);
}

// Call `body` with a number of vectors, 1 .. KEY_VECTORS, as a constant.
template <int V = KEY_VECTORS, class Body> INLINE auto by_vectors(int vectors, Body &&body) {
    if constexpr (V > 1)
        if (vectors < V) return by_vectors<V - 1>(vectors, body);
    return body(std::integral_constant<int, V>());
}

// What products of queries and keys become: capped, where there is a cap, and then a multiple of
// that is an exponent of two.
struct ScoreScale {
    float inner, cap, factor;  // cap 0: none

    explicit ScoreScale(const AttentionCall &call)
        : inner(call.scale * call.cache.key_scale), cap(call.softcap), factor(LOG2_E) {
        if (cap == 0.0f) factor *= inner;
        else inner /= cap;
    }

    __attribute__((always_inline)) F32 operator()(F32 product) const {
        if (cap == 0.0f) return product;
        return mul(splat(cap), hyperbolic_tangent(mul(product, splat(inner))));
    }
};

// What a query sees of a block, [from, until).
struct SeenKeys {
    int from, until;

    bool cuts(int vector) const { return from > vector * LANES || until < (vector + 1) * LANES; }
};

// The greatest of a query's scores in V vectors, by lanes. PLAIN: it sees all of the block, and nothing
// caps its scores; else they are capped, and those of what it does not see are put out.
template <int V, bool PLAIN>
INLINE F32 greatest_score(float *scores, const ScoreScale &scale, SeenKeys seen) {
    F32 most = splat(LOWEST);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
        F32 score = load(scores + v * LANES);
        if constexpr (!PLAIN) {
            score = scale(score);
            if (seen.cuts(v)) {
                // Those of no key may be anything, a NaN too.
                const F32 unseen = unseen_outside(seen.from - v * LANES, seen.until - v * LANES);
                score = where_negative(unseen, unseen, score);
            }
            store(scores + v * LANES, score);
        }
        most = max(most, score);
    }
    return most;
}

// Those scores become the keys' weights, rounded as they will be multiplied, while their sum by lanes,
// which is returned, is not. `top` is the query's running maximum, in powers of two. The weights may
// take the place of the scores.
template <class T, int V, bool PLAIN>
INLINE F32 weigh_scores(const float *scores, float factor, SeenKeys seen, float top, T *weights) {
    F32 total = zeros(), before = zeros();
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
        const F32 x = fma(load(scores + v * LANES), splat(factor), splat(-top));
        F32 weight = weight_of<T>(x);
        if (!PLAIN && seen.cuts(v)) weight = zero_below(x, splat(LEAST_POWER), weight);
        total = add(total, weight);
        if (v % 2) store_two(weights + (v - 1) * LANES, before, weight);
        else if (v + 1 == V) store(weights + v * LANES, weight);
        before = weight;
    }
    return total;
}

// Where the `index`-th of the task's queries begins.
template <class T>
INLINE const T *query_at(const AttentionCall &call, const AttentionTask &task, int64_t index) {
    const int64_t group = call.shape.queries_per_head;
    const T *q = static_cast<const T *>(call.q) + (task.token + index / group) * call.q_stride;
    return q + (task.head * group + index % group) * call.shape.head_size;
}

// The scores of a tile of queries, from `first` of the task's on, become weights in their place; what
// each has summed before is to be multiplied by its `rescale`, a vector of them.
template <class T>
INLINE void softmax_weights(
    const AttentionCall &call, const AttentionTask &task, int64_t first, int queries,
    const KeyBlock &block, AttentionScratch<T> &room, float *rescale) {
    float *top = room.sums.top + first, *mass = room.sums.mass + first;
    const int64_t group = call.shape.queries_per_head;
    const ScoreScale scale(call);
    constexpr int MOST = BLOCK_KEYS<T>;
    SeenKeys seen[ROOM_QUERIES];
    F32 each[ROOM_QUERIES];
    int64_t position = task.position + first / group, left = group - first % group;
    for (int r = 0; r < queries; ++r) {
        const PositionRange all = seen_from(call, task, position);
        if (--left == 0) {
            left = group;
            ++position;
        }
        const int64_t end = all.until - block.begin, begin = all.from - block.begin;
        seen[r].until = static_cast<int>(end < MOST ? end : MOST);
        seen[r].from = static_cast<int>(begin > MOST ? MOST : begin < 0 ? 0 : begin);
    }
    const auto by_kind = [&](int r, auto &&body) {
        if (seen[r].from == 0 && seen[r].until == MOST && scale.cap == 0.0f)
            return body(std::integral_constant<int, MOST / LANES>(), std::true_type());
        return by_vectors(
            block.vectors(), [&](auto vectors) { return body(vectors, std::false_type()); });
    };
    for (int r = 0; r < queries; ++r)
        each[r] = by_kind(r, [&](auto vectors, auto plain) {
            return greatest_score<vectors, plain>(room.scores[r], scale, seen[r]);
        });
    const F32 before = load(top, queries);
    const F32 highest = max(mul(reduce_max(each, queries), splat(scale.factor)), before);
    store(top, highest, queries);
    alignas(64) float tops[LANES];
    store(tops, highest);
    for (int r = 0; r < queries; ++r) {
        each[r] = by_kind(r, [&](auto vectors, auto plain) {
            return weigh_scores<T, vectors, plain>(
                room.scores[r], scale.factor, seen[r], tops[r], room.weights_of(r));
        });
    }
    const F32 old = power_of_two(sub(before, highest));
    store(rescale, old);
    store(mass, add(mul(load(mass, queries), old), sums(each, queries)), queries);
}

// R queries, from `first` of the task's on, attend to a block whose words are kept as K.
template <class T, class K, int R>
static void attend_tile(
    const AttentionCall &call, const AttentionTask &task, int64_t first, const KeyBlock &block,
    AttentionScratch<T> &room) {
    // What is widened needs registers, too.
    constexpr int VECTORS = IN_BYTES<K> && R > 4 ? 2 : TILE_VECTORS;
    const HeadBlock<T> &head = room.head;
    const uint32_t *each[R];
    for (int r = 0; r < R; ++r) each[r] = words_of(query_at<T>(call, task, first + r));
    in_tiles<VECTORS>(block.vectors(), [&](auto count, int64_t v) {
        F32 acc[R][count];
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < count; ++i) acc[r][i] = zeros();
        const uint32_t *keys[count];
        for (int i = 0; i < count; ++i) keys[i] = head.keys[v + i];
        const int64_t stride = head.key_stride;
        add_products<T, K>(acc, each, head.words, room.ahead, [&](int64_t word, int i) {
            return words_after<T, K>(keys[i], word * stride);
        });
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < count; ++i) store(room.scores[r] + (v + i) * LANES, acc[r][i]);
    });

    alignas(64) float rescale[LANES];
    softmax_weights(call, task, first, R, block, room, rescale);

    const int64_t begin = block.from / WORD_VALUES<T>, end = ceil_div(block.until, WORD_VALUES<T>);
    for (int r = 0; r < R; ++r) each[r] = words_of(room.weights_of(r)) + begin;
    in_tiles<VECTORS>(room.width / LANES, [&](auto count, int64_t v) {
        F32 acc[R][count];
        float *sums = room.sums.values + first * room.width + v * LANES;
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < count; ++i)
                acc[r][i] = mul(load(sums + r * room.width + i * LANES), splat(rescale[r]));
        const uint32_t *const *values = head.values + begin;
        add_products<T, K>(acc, each, end - begin, room.ahead, [&](int64_t step, int i) {
            return words_after<T, K>(values[step], (v + i) * LANES);
        });
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < count; ++i) store(sums + r * room.width + i * LANES, acc[r][i]);
    });
}

// Add what queries have summed over further keys.
INLINE void join_sums(
    const AttentionSums &sums, const AttentionSums &more, int64_t queries, int64_t width) {
    for (int64_t i = 0; i < queries; ++i) {
        const float before = sums.top[i], other = more.top[i];
        const float top = before > other ? before : other;
        const F32 rescale = power_of_two(splat(before - top));
        const F32 added = power_of_two(splat(other - top));
        float *values = sums.values + i * width;
        const float *others = more.values + i * width;
        for (int64_t d = 0; d < width; d += LANES)
            store(values + d, fma(load(others + d), added, mul(load(values + d), rescale)));
        sums.mass[i] = sums.mass[i] * lane_0(rescale) + more.mass[i] * lane_0(added);
        sums.top[i] = top;
    }
}

}  // namespace ISA_NS
