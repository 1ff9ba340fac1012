// The small operations between linears and attention: norms, rotation, gates, and the cache.
//
// Each has the roundings of its torch reference, so that it is equal to it but for the order in
// which a norm's squares are summed. That order depends on the size of a row alone.

#pragma once

#include "activation.h"
#include "fp8.h"
#include "gemm.h"
#include "kv_layout.h"
#include "layout.h"
#include "simd.h"
#include "team.h"
#include "vectors.h"

namespace ISA_NS {

// Rows that a thread takes at once: enough numbers to be worth a ticket.
INLINE int64_t rows_together(int64_t rows, int64_t size, int threads) {
    const int64_t worth = ceil_div(8192, size), fair = ceil_div(rows, threads);
    return worth < fair ? worth : fair;
}

// Call `body(row)` for all rows, shared out among threads.
template <class Body>
static void by_rows(int64_t rows, int64_t size, int threads, Body &&body) {
    if (rows == 0) return;
    const int64_t together = rows_together(rows, size, threads);
    const int64_t chunks = ceil_div(rows, together);
    const auto chunk_rows = [&](int64_t chunk) {
        const int64_t end = (chunk + 1) * together < rows ? (chunk + 1) * together : rows;
        for (int64_t row = chunk * together; row < end; ++row) body(row);
    };
    if (chunks == 1) return chunk_rows(0);
    Phase phase = {};
    in_team(threads, &phase, [&](TeamThread &team) { team.run(chunks, chunk_rows); });
}

// x, whose squares have this sum, scaled to unit root-mean-square. A weight in float32 beside
// numbers of fewer bits is wide: nothing is rounded before it.
template <class T, class W>
INLINE void scale_to_unit(
    const T *x, float squares, const W *weight, int64_t size, float eps, T *out) {
    const F32 inverse = splat(1.0f / __builtin_sqrtf(squares / static_cast<float>(size) + eps));
    by_vectors(size, [&](int64_t i, auto part) {
        const F32 scaled = mul(load_part(x + i, part), inverse);
        const F32 unit = std::is_same_v<T, W> ? rounded<T>(scaled) : scaled;
        store_part(out + i, mul(unit, load_part(weight + i, part)), part);
    });
}

// x, scaled to unit root-mean-square. Returns the sum of squares.
template <class T, class W>
INLINE float normalise(const T *x, const W *weight, int64_t size, float eps, T *out) {
    F32 squares = zeros();
    by_vectors(size, [&](int64_t i, auto part) {
        const F32 value = load_part(x + i, part);
        squares = fma(value, value, squares);
    });
    const float total = sum(squares);
    scale_to_unit(x, total, weight, size, eps, out);
    return total;
}

// The same of x + residual, which becomes `total`.
template <class T, class W>
INLINE float normalise_sum(
    const T *x, const T *residual, const W *weight, int64_t size, float eps, T *total, T *out) {
    constexpr int64_t LINE = 64 / sizeof(T), AHEAD = 2;
    F32 squares = zeros();
    by_vectors(size, [&](int64_t i, auto part) {
        // Another thread may have written the rows to come, and then they are far away.
        if (i % LINE == 0) {
            _mm_prefetch(reinterpret_cast<const char *>(x + AHEAD * size + i), _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char *>(residual + AHEAD * size + i), _MM_HINT_T0);
        }
        const F32 value = rounded<T>(add(load_part(x + i, part), load_part(residual + i, part)));
        store_part(total + i, value, part);
        squares = fma(value, value, squares);
    });
    const float whole = sum(squares);
    scale_to_unit(total, whole, weight, size, eps, out);
    return whole;
}

// x with zero mean and unit variance, times the weight and plus the bias, if there are any. Returns
// the sum of the squares of what is left of x without its mean.
template <class T>
INLINE float layer_normalise(
    const T *x, const T *weight, const T *bias, int64_t size, float eps, T *out) {
    F32 total = zeros(), squares = zeros();
    by_vectors(size, [&](int64_t i, auto part) { total = add(total, load_part(x + i, part)); });
    const F32 mean = splat(sum(total) / static_cast<float>(size));
    by_vectors(size, [&](int64_t i, auto part) {
        F32 left = sub(load_part(x + i, part), mean);
        if constexpr (std::is_same_v<decltype(part), Part>) {
            alignas(64) float lanes[LANES];
            store(lanes, left);
            left = load(lanes, part.count);
        }
        squares = fma(left, left, squares);
    });
    const float whole = sum(squares);
    const F32 inverse = splat(1.0f / __builtin_sqrtf(whole / static_cast<float>(size) + eps));
    by_vectors(size, [&](int64_t i, auto part) {
        F32 y = mul(sub(load_part(x + i, part), mean), inverse);
        if (weight) y = mul(y, load_part(weight + i, part));
        if (bias) y = add(y, load_part(bias + i, part));
        store_part(out + i, y, part);
    });
    return whole;
}

// The sum of x and the residual, rounded, becomes `total`, which may be either.
template <class T> INLINE void add_rows(const T *x, const T *residual, int64_t size, T *total) {
    by_vectors(size, [&](int64_t i, auto part) {
        store_part(total + i, add(load_part(x + i, part), load_part(residual + i, part)), part);
    });
}

// A row times a factor; `out` may be `x`.
template <class T> INLINE void scale_row(const T *x, float factor, int64_t size, T *out) {
    by_vectors(size, [&](int64_t i, auto part) {
        store_part(out + i, mul(load_part(x + i, part), splat(factor)), part);
    });
}

// Numbers become cap * tanh(x / cap).
INLINE void cap_row(float *x, float cap, int64_t size) {
    by_vectors(size, [&](int64_t i, auto part) {
        const F32 bent = hyperbolic_tangent(div(load_part(x + i, part), splat(cap)));
        store_part(x + i, mul(splat(cap), bent), part);
    });
}

// Numbers times the sigmoids of their gates; `out` may be `x`.
template <class T>
INLINE void sigmoid_mul_row(const T *x, const T *gate, int64_t size, T *out) {
    by_vectors(size, [&](int64_t i, auto part) {
        const F32 share = rounded<T>(times_sigmoid(splat(1.0f), load_part(gate + i, part)));
        store_part(out + i, mul(load_part(x + i, part), share), part);
    });
}

template <class T> INLINE void norm_row(const NormCall &call, int64_t row) {
    const int64_t at = row * call.size;
    const T *x = static_cast<const T *>(call.x) + at;
    const T *residual = static_cast<const T *>(call.residual) + (call.residual ? at : 0);
    T *total = static_cast<T *>(call.total) + (call.residual ? at : 0);
    T *out = static_cast<T *>(call.out) + at;
    float squares;
    if (call.kind == NormKind::none) {
        if (residual) add_rows(x, residual, call.size, total);
        return;
    }
    if (call.kind == NormKind::layer) {
        if (residual) {
            add_rows(x, residual, call.size, total);
            x = total;
        }
        const T *weight = static_cast<const T *>(call.weight);
        const T *bias = static_cast<const T *>(call.bias);
        squares = layer_normalise(x, weight, bias, call.size, call.eps, out);
    } else {
        const auto scaled_by = [&](auto *weight) {
            if (residual)
                return normalise_sum(x, residual, weight, call.size, call.eps, total, out);
            return normalise(x, weight, call.size, call.eps, out);
        };
        squares = call.kind == NormKind::rms_wide
            ? scaled_by(static_cast<const float *>(call.weight))
            : scaled_by(static_cast<const T *>(call.weight));
    }
    if (call.finite) call.finite[row] = __builtin_isfinite(squares);
}

// activation(gate) * up of a row whose second half is `up`.
template <Activation A, class T> INLINE void gate_row(const T *gate_up, int64_t width, T *out) {
    by_vectors(width, [&](int64_t i, auto part) {
        const F32 gate = load_part(gate_up + i, part), up = load_part(gate_up + width + i, part);
        store_part(out + i, gated<A, T>(gate, up), part);
    });
}

// Each pair (i, i + size / 2) turned by its angle; `out` may be `x`.
template <class T>
INLINE void rotate(const T *x, const T *cos, const T *sin, int64_t size, T *out) {
    const int64_t half = size / 2;
    by_vectors(half, [&](int64_t i, auto part) {
        const auto turned = [&](F32 own, F32 other, int64_t at) {
            const F32 kept = rounded<T>(mul(own, load_part(cos + at, part)));
            return add(kept, rounded<T>(mul(other, load_part(sin + at, part))));
        };
        const F32 a = load_part(x + i, part), b = load_part(x + half + i, part);
        store_part(out + i, turned(a, b, i), part);
        store_part(out + half + i, turned(b, a, half + i), part);
    });
}

// Numbers as they are kept, each divided by the scale.
template <class T, class K>
INLINE void store_cache(const T *x, int64_t size, float scale, K *kept) {
    by_vectors(size, [&](int64_t i, auto part) {
        const F32 divided = div(load_part(x + i, part), splat(scale));
        if constexpr (std::is_same_v<decltype(part), Whole>) store_codes(kept + i, divided);
        else store_codes(kept + i, divided, part.count);
    });
}

// Keep one token's key or value of a head, whose words of W numbers lie `step` numbers apart.
template <int64_t W, class K>
INLINE void scatter(const K *x, int64_t size, int64_t step, K *kept) {
    for (int64_t i = 0; i < size; i += W, kept += step) std::memcpy(kept, x + i, W * sizeof(K));
}

// Numbers of queries or keys, normalised.
template <class T>
INLINE void normalise_heads(
    const QkNorms &norms, const T *x, const void *weight, const void *bias, int64_t size, T *to) {
    switch (norms.kind) {
        case NormKind::rms:
            normalise(x, static_cast<const T *>(weight), size, norms.eps, to);
            return;
        case NormKind::rms_wide:
            normalise(x, static_cast<const float *>(weight), size, norms.eps, to);
            return;
        default:
            layer_normalise(
                x, static_cast<const T *>(weight), static_cast<const T *>(bias), size, norms.eps,
                to);
    }
}

// The heads of one token that belong to kv heads [head, head + heads), normalised and rotated; all of
// them where norms are over a token. Calls `keep(i, key, value)` with those of each kv head.
template <class T, class Keep>
INLINE void qk_norm_rope(
    const QkNormRopeCall &call, int64_t token, int64_t head, int64_t heads, Keep &&keep) {
    static thread_local Scratch scratch;
    const int64_t size = call.shape.head_size, group = call.shape.queries_per_head;
    const int64_t kv = call.shape.heads, queries = kv * group;
    const T *from = static_cast<const T *>(call.heads) + token * call.heads_stride;
    const T *own_queries = from, *own_keys = from + queries * size;
    const T *own_values = own_keys + kv * size;
    const int64_t turned = call.rotated;
    const int64_t position = call.positions ? call.positions[token] : token;
    const int64_t turn = position * turned;
    const T *cos = static_cast<const T *>(call.cos) + turn;
    const T *sin = static_cast<const T *>(call.sin) + turn;
    const QkNorms &norms = call.norms;
    const bool each = norms.kind != NormKind::none && !norms.over_token;
    T *q = static_cast<T *>(call.q) + token * call.q_stride;
    T *row = static_cast<T *>(scratch.reserve((1 + kv) * size * sizeof(T)));
    if (norms.over_token) {
        normalise_heads(norms, own_queries, norms.query, norms.query_bias, queries * size, q);
        normalise_heads(norms, own_keys, norms.key, norms.key_bias, kv * size, row + size);
        own_queries = q;
        own_keys = row + size;
    }
    const auto ready = [&](const T *x, const void *weight, const void *bias, T *to) {
        if (each) {
            normalise_heads(norms, x, weight, bias, size, to);
            x = to;
        }
        rotate(x, cos, sin, turned, to);
        if (x != to && turned < size)
            std::memcpy(to + turned, x + turned, (size - turned) * sizeof(T));
    };
    for (int64_t i = head * group; i < (head + heads) * group; ++i) {
        const T *own = own_queries + i * size;
        if (call.query_scale) {
            scale_row(own, call.query_scale[position], size, q + i * size);
            own = q + i * size;
        }
        ready(own, norms.query, norms.query_bias, q + i * size);
    }
    for (int64_t i = head; i < head + heads; ++i) {
        ready(own_keys + i * size, norms.key, norms.key_bias, row);
        keep(i, row, own_values + i * size);
    }
}

// The same, kept as K.
template <class T, class K>
INLINE void qk_norm_rope_store(
    const QkNormRopeCall &call, int64_t token, int64_t head, int64_t heads) {
    static thread_local Scratch scratch;
    const int64_t size = call.shape.head_size;
    const KvLayout layout(call.shape);
    const int64_t page = call.places[token] / layout.tokens;
    const int64_t offset = call.places[token] % layout.tokens;
    const auto kept_as = [&](const T *x, float scale) {
        if constexpr (!IN_BYTES<K>) {
            return x;
        } else {
            K *codes = static_cast<K *>(scratch.reserve(size * sizeof(K)));
            store_cache(x, size, scale, codes);
            return static_cast<const K *>(codes);
        }
    };
    qk_norm_rope<T>(call, token, head, heads, [&](int64_t i, const T *key, const T *value) {
        K *keys = static_cast<K *>(call.cache.keys) + call.cache.head_at(page, i);
        K *values = static_cast<K *>(call.cache.values) + call.cache.head_at(page, i);
        scatter<WORD_VALUES<T>>(
            kept_as(key, call.cache.key_scale), size, layout.key_step(),
            keys + layout.key_at(offset));
        // Another thread may keep the token beside it in a word.
        scatter<1>(
            kept_as(value, call.cache.value_scale), size, layout.word,
            values + layout.value_at(offset));
    });
}

// Whether tokens from one on, before `last`, are a vector of a page that keeps numbers as they are.
INLINE bool fills_vector(const QkNormRopeCall &call, int64_t token, int64_t last) {
    const CacheShape &shape = call.shape;
    if (shape.format != CacheFormat::model || shape.page_tokens % LANES != 0) return false;
    if (last - token < LANES || call.places[token] % LANES != 0) return false;
    for (int64_t i = 1; i < LANES; ++i)
        if (call.places[token + i] != call.places[token] + i) return false;
    return true;
}

// All heads of the tokens of such a vector: a line of the cache is written once.
template <class T>
INLINE void qk_norm_rope_store_vector(const QkNormRopeCall &call, int64_t token) {
    static thread_local Scratch scratch;
    const int64_t size = call.shape.head_size, kv = call.shape.heads;
    const int64_t words = size / WORD_VALUES<T>;
    auto *keys = static_cast<uint32_t *>(scratch.reserve(kv * LANES * words * sizeof(uint32_t)));
    const T *values[LANES];
    for (int64_t r = 0; r < LANES; ++r)
        qk_norm_rope<T>(call, token + r, 0, kv, [&](int64_t i, const T *key, const T *value) {
            std::memcpy(keys + (i * LANES + r) * words, key, size * sizeof(T));
            if (i == 0) values[r] = value;
        });
    const KvLayout layout(call.shape);
    const int64_t page = call.places[token] / layout.tokens;
    const int64_t offset = call.places[token] % layout.tokens;
    for (int64_t i = 0; i < kv; ++i) {
        T *kept_keys = static_cast<T *>(call.cache.keys) + call.cache.head_at(page, i);
        T *kept_values = static_cast<T *>(call.cache.values) + call.cache.head_at(page, i);
        const uint32_t *rows[LANES];
        for (int64_t r = 0; r < LANES; ++r) rows[r] = keys + (i * LANES + r) * words;
        auto *to = reinterpret_cast<uint32_t *>(kept_keys + layout.key_at(offset));
        transpose(rows, words, to, layout.tokens);
        for (int64_t r = 0; r < LANES; r += WORD_VALUES<T>)
            lay_side_by_side(
                values[r] + i * size, values[r + WORD_VALUES<T> - 1] + i * size, size,
                reinterpret_cast<uint32_t *>(kept_values + layout.value_at(offset + r)));
    }
}

// Pairs that lie side by side as two halves; `out` is not `x`.
template <class T> INLINE void split_pairs(const T *x, int64_t size, T *out) {
    for (int64_t i = 0; i < size / 2; ++i) {
        out[i] = x[2 * i];
        out[size / 2 + i] = x[2 * i + 1];
    }
}

// Keep a token's key in the one head of a cache of latents, as K; `room` has as many numbers.
template <class T, class K>
INLINE void store_latent(
    const CacheShape &shape, const LayerCache &cache, int64_t place, const T *x, void *room) {
    const KvLayout layout(shape);
    K *keys = static_cast<K *>(cache.keys) + cache.head_at(place / layout.tokens, 0) +
        layout.key_at(place % layout.tokens);
    if constexpr (IN_BYTES<K>) {
        K *codes = static_cast<K *>(room);
        store_cache(x, shape.head_size, cache.key_scale, codes);
        scatter<WORD_VALUES<T>>(codes, shape.head_size, layout.key_step(), keys);
    } else {
        scatter<WORD_VALUES<T>>(x, shape.head_size, layout.key_step(), keys);
    }
}

template <class T>
INLINE void qk_norm_rope_store_as(
    const QkNormRopeCall &call, int64_t token, int64_t head, int64_t heads) {
    switch (call.shape.format) {
        case CacheFormat::model: return qk_norm_rope_store<T, T>(call, token, head, heads);
        case CacheFormat::e4m3: return qk_norm_rope_store<T, E4m3>(call, token, head, heads);
        case CacheFormat::e5m2: return qk_norm_rope_store<T, E5m2>(call, token, head, heads);
    }
}

INLINE void norm_one(const NormCall &call, int64_t row) {
    if (call.dtype == Dtype::bf16) norm_row<bf16>(call, row);
    else norm_row<float>(call, row);
}

INLINE void qk_norm_rope_store_token(
    const QkNormRopeCall &call, int64_t token, int64_t head, int64_t heads) {
    if (call.shape.dtype == Dtype::bf16) qk_norm_rope_store_as<bf16>(call, token, head, heads);
    else qk_norm_rope_store_as<float>(call, token, head, heads);
}

// All heads of tokens [first, last).
INLINE void qk_norm_rope_store_tokens(const QkNormRopeCall &call, int64_t first, int64_t last) {
    while (first < last) {
        if (!fills_vector(call, first, last)) {
            qk_norm_rope_store_token(call, first++, 0, call.shape.heads);
            continue;
        }
        if (call.shape.dtype == Dtype::bf16) qk_norm_rope_store_vector<bf16>(call, first);
        else qk_norm_rope_store_vector<float>(call, first);
        first += LANES;
    }
}

// Whole calls, each with a team of its own.

static void norm_call(const NormCall &call, int threads) {
    by_rows(call.rows, call.size, threads, [&](int64_t row) { norm_one(call, row); });
}

template <class T>
static void activate_rows(Activation activation, const T *x, int64_t size, T *out, int threads) {
    // In rows of one size: where a vector ends is no part of a number's result.
    constexpr int64_t ROW = 4096;
    by_activation(activation, [&](auto kind) {
        by_rows(ceil_div(size, ROW), ROW, threads, [&](int64_t row) {
            const int64_t at = row * ROW;
            by_vectors(size - at < ROW ? size - at : ROW, [&](int64_t i, auto part) {
                store_part(out + at + i, activated<kind()>(load_part(x + at + i, part)), part);
            });
        });
    });
}

static void activate_call(
    Dtype dtype, Activation activation, const void *x, int64_t size, void *out, int threads) {
    if (dtype == Dtype::bf16) {
        const auto *in = static_cast<const bf16 *>(x);
        activate_rows(activation, in, size, static_cast<bf16 *>(out), threads);
    } else {
        const auto *in = static_cast<const float *>(x);
        activate_rows(activation, in, size, static_cast<float *>(out), threads);
    }
}

template <class T>
static void gate_rows(
    Activation activation, const T *gate_up, int64_t rows, int64_t width, T *out, int threads) {
    by_activation(activation, [&](auto kind) {
        by_rows(rows, width, threads, [&](int64_t row) {
            gate_row<kind()>(gate_up + row * 2 * width, width, out + row * width);
        });
    });
}

static void gate_call(
    Dtype dtype, Activation activation, const void *gate_up, int64_t rows, int64_t width, void *out,
    int threads) {
    if (dtype == Dtype::bf16) {
        const auto *in = static_cast<const bf16 *>(gate_up);
        gate_rows(activation, in, rows, width, static_cast<bf16 *>(out), threads);
    } else {
        const auto *in = static_cast<const float *>(gate_up);
        gate_rows(activation, in, rows, width, static_cast<float *>(out), threads);
    }
}

// x and out (rows, size); the gates of row r begin at r * stride.
static void sigmoid_mul_call(
    Dtype dtype, const void *x, const void *gate, int64_t stride, int64_t rows, int64_t size,
    void *out, int threads) {
    const auto multiply = [&](auto number) {
        using T = decltype(number);
        by_rows(rows, size, threads, [&](int64_t row) {
            sigmoid_mul_row(
                static_cast<const T *>(x) + row * size, static_cast<const T *>(gate) + row * stride,
                size, static_cast<T *>(out) + row * size);
        });
    };
    if (dtype == Dtype::bf16) multiply(bf16());
    else multiply(float());
}

static void cap_call(float *x, int64_t size, float cap, int threads) {
    constexpr int64_t ROW = 4096;
    by_rows(ceil_div(size, ROW), ROW, threads, [&](int64_t row) {
        const int64_t at = row * ROW;
        cap_row(x + at, cap, size - at < ROW ? size - at : ROW);
    });
}

static void qk_norm_rope_store_call(const QkNormRopeCall &call, int64_t tokens, int threads) {
    const CacheShape &shape = call.shape;
    const int64_t size = shape.heads * (shape.queries_per_head + 2) * shape.head_size;
    constexpr int64_t BLOCK = 4 * LANES;
    by_rows(ceil_div(tokens, BLOCK), BLOCK * size, threads, [&](int64_t block) {
        const int64_t end = (block + 1) * BLOCK;
        qk_norm_rope_store_tokens(call, block * BLOCK, end < tokens ? end : tokens);
    });
}

}  // namespace ISA_NS
