// Recurrences over states, token by token: Mamba 2 (ssd) and the gated delta rule.
//
// A thread takes some columns of a head's state through all tokens of a row, in the first-level
// cache: columns do not depend on each other. So a token costs the same products in a prompt as in
// a decode step, and has the same bits, whatever chunks a prompt is cut into.

#pragma once

#include "activation.h"
#include "layout.h"
#include "recurrence.h"
#include "simd.h"
#include "team.h"
#include "vectors.h"

namespace ISA_NS {

// Columns of a state that a thread takes along; 128 rows of them are 16 KiB.
static constexpr int STATE_VECTORS = 2, STATE_COLUMNS = STATE_VECTORS * LANES;

// log(1 + e^x): 2 atanh(y / (2 + y)) of y = e^-|x| is log(1 + y), as a series.
INLINE F32 softplus(F32 x) {
    const F32 y = exponential(sub(zeros(), absolute(x)));
    const F32 s = div(y, add(splat(2.0f), y)), square = mul(s, s);
    F32 p = fma(square, splat(2.0f / 15), splat(2.0f / 13));
    p = fma(square, p, splat(2.0f / 11));
    p = fma(square, p, splat(2.0f / 9));
    p = fma(square, p, splat(2.0f / 7));
    p = fma(square, p, splat(2.0f / 5));
    p = fma(square, p, splat(2.0f / 3));
    p = fma(square, p, splat(2.0f));
    return fma(p, s, max(zeros(), x));
}

// Several vectors of columns, the last of which may be short or empty.
struct Columns {
    F32 of[STATE_VECTORS];
};

INLINE int columns_in(int64_t count, int vector) {
    const int64_t left = count - vector * LANES;
    return static_cast<int>(left < 0 ? 0 : left < LANES ? left : LANES);
}

INLINE Columns load_columns(const float *p, int64_t count) {
    Columns x;
    for (int j = 0; j < STATE_VECTORS; ++j) {
        if (count == STATE_COLUMNS) x.of[j] = load(p + j * LANES);
        else if (const int own = columns_in(count, j)) x.of[j] = load(p + j * LANES, own);
        else x.of[j] = zeros();
    }
    return x;
}

INLINE void store_columns(float *p, const Columns &x, int64_t count) {
    for (int j = 0; j < STATE_VECTORS; ++j) {
        if (count == STATE_COLUMNS) store(p + j * LANES, x.of[j]);
        else if (const int own = columns_in(count, j)) store(p + j * LANES, x.of[j], own);
    }
}

template <class T> class RecurrenceRun {
  public:
    RecurrenceRun(const RecurrenceCall &call, TeamThread &team)
        : call_(call), layer_(*call.layer), team_(team) {}

    // Three phases: each token by itself; the states; each token by itself.
    void run() {
        const int64_t tokens = call_.tokens, blocks = ceil_div(tokens, TOKENS);
        const auto in_block = [&](int64_t block, auto &&body) {
            const int64_t end = (block + 1) * TOKENS;
            for (int64_t token = block * TOKENS; token < (end < tokens ? end : tokens); ++token)
                body(token);
        };
        team_.run(blocks + call_.rows.count, [&](int64_t i) {
            if (i < blocks) in_block(i, [&](int64_t token) { enter(token); });
            else keep_inputs(call_.rows.rows[i - blocks]);
        });
        const int64_t blocks_of_columns = ceil_div(layer_.columns, STATE_COLUMNS);
        const int64_t parts = layer_.heads * blocks_of_columns;
        team_.run(call_.rows.count * parts, [&](int64_t i) {
            const int64_t head = i % parts / blocks_of_columns;
            advance(call_.rows.rows[i / parts], head, i % blocks_of_columns * STATE_COLUMNS);
        });
        team_.run(blocks, [&](int64_t i) { in_block(i, [&](int64_t token) { leave(token); }); });
    }

  private:
    static constexpr int64_t TOKENS = 4;  // of a chunk

    const T *projected(int64_t token) const {
        return static_cast<const T *>(call_.projected) + token * layer_.inputs();
    }

    // Numbers of a token's projection from `at` on, multiplied where they are to be.
    template <class P> F32 scaled(const T *row, int64_t at, P part) const {
        const F32 x = load_part(row + at, part);
        if (layer_.scales == nullptr) return x;
        return rounded<T>(mul(x, load_part(static_cast<const T *>(layer_.scales) + at, part)));
    }

    // The inputs of the convolution `back` tokens before one of the row: a token's of this pass, one
    // of those that were kept, or none.
    struct Inputs {
        const T *pass, *kept;
    };

    Inputs inputs(const StateRow &row, int64_t token, int64_t back) const {
        const int64_t at = token - back - row.token;
        if (at >= 0) return {projected(token - back), nullptr};
        if (row.read < 0) return {nullptr, nullptr};
        const T *states = static_cast<const T *>(call_.conv_states);
        const int64_t index = row.read * (layer_.taps - 1) + layer_.taps - 1 + at;
        return {nullptr, states + index * layer_.channels()};
    }

    template <class P> F32 input(const Inputs &inputs, int64_t i, P part) const {
        if (inputs.pass) return scaled(inputs.pass, layer_.convolved_at() + i, part);
        return inputs.kept ? load_part(inputs.kept + i, part) : zeros();
    }

    // Before the states: the convolution, and the factors of a token.
    void enter(int64_t token) const {
        const StateRow &row = call_.rows.rows[call_.rows.token_rows[token]];
        const int64_t taps = layer_.taps, channels = layer_.channels();
        const T *weight = static_cast<const T *>(layer_.conv);
        const T *bias = static_cast<const T *>(layer_.conv_bias);
        float *mixed = call_.room.mixed + token * channels;
        Inputs seen[CONV_TAPS_MAX];
        for (int64_t tap = 0; tap < taps; ++tap) seen[tap] = inputs(row, token, taps - 1 - tap);
        by_vectors(channels, [&](int64_t i, auto part) {
            F32 sum = zeros();
            for (int64_t tap = 0; tap < taps; ++tap)
                sum = fma(
                    input(seen[tap], i, part), load_part(weight + tap * channels + i, part), sum);
            if (bias) sum = add(sum, load_part(bias + i, part));
            store_part(mixed + i, rounded<T>(times_sigmoid(sum, sum)), part);
        });
        rate(token);
        if (layer_.kind == RecurrenceKind::ssd) return;
        const int64_t keys = layer_.key_heads * layer_.rows;
        const float query_scale = 1.0f / __builtin_sqrtf(static_cast<float>(layer_.rows));
        for (int64_t head = 0; head < layer_.key_heads; ++head) {
            to_unit(mixed + head * layer_.rows, query_scale);
            to_unit(mixed + keys + head * layer_.rows, 1.0f);
        }
    }

    void to_unit(float *x, float scale) const {
        constexpr float EPS = 1e-6f;
        F32 squares = zeros();
        by_vectors(layer_.rows, [&](int64_t i, auto part) {
            const F32 value = load_part(x + i, part);
            squares = fma(value, value, squares);
        });
        const F32 factor = splat(scale / __builtin_sqrtf(sum(squares) + EPS));
        by_vectors(layer_.rows, [&](int64_t i, auto part) {
            store_part(x + i, mul(load_part(x + i, part), factor), part);
        });
    }

    // By how much states decay at a token, and how much it writes.
    void rate(int64_t token) const {
        const T *row = projected(token);
        const int64_t at = layer_.rates_at(), heads = layer_.heads;
        float *decay = call_.room.rates + token * 2 * heads, *weight = decay + heads;
        const bool delta = layer_.kind == RecurrenceKind::gated_delta;
        by_vectors(heads, [&](int64_t i, auto part) {
            const F32 step =
                add(scaled(row, at + (delta ? heads : 0) + i, part),
                    load_part(layer_.step_bias + i, part));
            F32 size = softplus(step);
            if (!delta) size = min(splat(layer_.step_max), max(splat(layer_.step_min), size));
            const F32 speed = exponential(load_part(layer_.decay_log + i, part));
            store_part(decay + i, exponential(sub(zeros(), mul(speed, size))), part);
            F32 written = size;
            if (delta) written = times_sigmoid(splat(1.0f), scaled(row, at + i, part));
            store_part(weight + i, written, part);
        });
    }

    // The last inputs of the convolution after a row's last token, or after each.
    void keep_inputs(const StateRow &row) const {
        const int64_t kept = layer_.taps - 1, channels = layer_.channels();
        for (int64_t i = row.several ? 0 : row.count - 1; i < row.count; ++i) {
            const int64_t state = row.writes[row.several ? i : 0];
            T *to = static_cast<T *>(call_.conv_states) + state * layer_.conv_state();
            for (int64_t k = 0; k < kept; ++k, to += channels) {
                const Inputs from = inputs(row, row.token + i, kept - 1 - k);
                by_vectors(channels, [&](int64_t c, auto part) {
                    store_part(to + c, input(from, c, part), part);
                });
            }
        }
    }

    // Some columns of a head's state go through the tokens of a row.
    void advance(const StateRow &row, int64_t head, int64_t column) const {
        static thread_local Scratch scratch;
        const int64_t rows = layer_.rows, columns = layer_.columns;
        const int64_t left = columns - column, count = left < STATE_COLUMNS ? left : STATE_COLUMNS;
        auto *state = static_cast<float *>(scratch.reserve(rows * STATE_COLUMNS * sizeof(float)));
        const auto at = [&](int64_t place) {
            return call_.states + place * layer_.state() + head * rows * columns + column;
        };
        for (int64_t i = 0; i < rows; ++i) {
            const Columns from = row.read < 0 ? Columns{{zeros(), zeros()}}
                                              : load_columns(at(row.read) + i * columns, count);
            store_columns(state + i * STATE_COLUMNS, from, STATE_COLUMNS);
        }
        for (int64_t t = 0; t < row.count; ++t) {
            const int64_t token = row.token + t;
            if (layer_.kind == RecurrenceKind::ssd) ssd(token, head, column, count, state);
            else gated_delta(token, head, column, count, state);
            if (!row.several && t + 1 < row.count) continue;
            float *to = at(row.writes[row.several ? t : 0]);
            for (int64_t i = 0; i < rows; ++i)
                store_columns(
                    to + i * columns, load_columns(state + i * STATE_COLUMNS, STATE_COLUMNS),
                    count);
        }
    }

    float *y_at(int64_t token, int64_t head, int64_t column) const {
        return call_.room.y + token * layer_.width() + head * layer_.columns + column;
    }

    // h = exp(dt a) h + b (dt x)^T, y = h^T c + d x.
    // Source: Dao and Gu 2024, arXiv:2405.21060.
    void ssd(int64_t token, int64_t head, int64_t column, int64_t count, float *state) const {
        const int64_t rows = layer_.rows, group = head / (layer_.heads / layer_.key_heads);
        const float *mixed = call_.room.mixed + token * layer_.channels();
        const float *b = mixed + layer_.width() + group * rows, *c = b + layer_.key_heads * rows;
        const float *rates = call_.room.rates + token * 2 * layer_.heads;
        const Columns x = load_columns(mixed + head * layer_.columns + column, count);
        const F32 decay = splat(rates[head]), step = splat(rates[layer_.heads + head]);
        Columns written, y[2] = {{{zeros(), zeros()}}, {{zeros(), zeros()}}};
        for (int j = 0; j < STATE_VECTORS; ++j) written.of[j] = mul(x.of[j], step);
        const auto pass = [&](int64_t i, Columns &sums) {
            float *h = state + i * STATE_COLUMNS;
            for (int j = 0; j < STATE_VECTORS; ++j) {
                const F32 old = mul(load(h + j * LANES), decay);
                const F32 now = fma(splat(b[i]), written.of[j], old);
                store(h + j * LANES, now);
                sums.of[j] = fma(splat(c[i]), now, sums.of[j]);
            }
        };
        int64_t i = 0;
        for (; i + 2 <= rows; i += 2) {
            pass(i, y[0]);
            pass(i + 1, y[1]);
        }
        if (i < rows) pass(i, y[0]);
        const F32 skip = splat(layer_.skip[head]);
        for (int j = 0; j < STATE_VECTORS; ++j)
            y[0].of[j] = fma(skip, x.of[j], add(y[0].of[j], y[1].of[j]));
        store_columns(y_at(token, head, column), y[0], count);
    }

    // h = exp(decay) h, h += k (beta (v - h^T k))^T, y = h^T q.
    // Source: Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464.
    void gated_delta(
        int64_t token, int64_t head, int64_t column, int64_t count, float *state) const {
        const int64_t rows = layer_.rows, keys = layer_.key_heads * rows;
        const int64_t group = head / (layer_.heads / layer_.key_heads);
        const float *mixed = call_.room.mixed + token * layer_.channels();
        const float *q = mixed + group * rows, *k = q + keys;
        const float *rates = call_.room.rates + token * 2 * layer_.heads;
        const Columns v = load_columns(mixed + 2 * keys + head * layer_.columns + column, count);
        const F32 decay = splat(rates[head]), beta = splat(rates[layer_.heads + head]);
        Columns known[4] = {}, y[2] = {}, written;
        const auto look_up = [&](int64_t i, Columns &sums) {
            const float *h = state + i * STATE_COLUMNS;
            for (int j = 0; j < STATE_VECTORS; ++j)
                sums.of[j] = fma(splat(k[i]), load(h + j * LANES), sums.of[j]);
        };
        int64_t i = 0;
        for (; i + 4 <= rows; i += 4)
            for (int chain = 0; chain < 4; ++chain) look_up(i + chain, known[chain]);
        for (; i < rows; ++i) look_up(i, known[0]);
        for (int j = 0; j < STATE_VECTORS; ++j) {
            const F32 sums =
                add(add(known[0].of[j], known[1].of[j]), add(known[2].of[j], known[3].of[j]));
            written.of[j] = mul(sub(v.of[j], mul(decay, sums)), beta);
        }
        const auto pass = [&](int64_t i, Columns &sums) {
            float *h = state + i * STATE_COLUMNS;
            for (int j = 0; j < STATE_VECTORS; ++j) {
                const F32 old = mul(load(h + j * LANES), decay);
                const F32 now = fma(splat(k[i]), written.of[j], old);
                store(h + j * LANES, now);
                sums.of[j] = fma(splat(q[i]), now, sums.of[j]);
            }
        };
        for (i = 0; i + 2 <= rows; i += 2) {
            pass(i, y[0]);
            pass(i + 1, y[1]);
        }
        if (i < rows) pass(i, y[0]);
        for (int j = 0; j < STATE_VECTORS; ++j) y[0].of[j] = add(y[0].of[j], y[1].of[j]);
        store_columns(y_at(token, head, column), y[0], count);
    }

    // Behind the states: the gate, and the norm where there is one.
    void leave(int64_t token) const {
        const int64_t width = layer_.width(), part_size = layer_.norm_part;
        const T *row = projected(token), *weight = static_cast<const T *>(layer_.norm);
        float *y = call_.room.y + token * width;
        T *out = static_cast<T *>(call_.out) + token * width;
        const auto gate = [&](int64_t i, auto part) {
            const F32 x = scaled(row, layer_.gate_at() + i, part);
            return times_sigmoid(x, x);
        };
        if (weight == nullptr) {
            by_vectors(width, [&](int64_t i, auto part) {
                store_part(out + i, mul(load_part(y + i, part), gate(i, part)), part);
            });
            return;
        }
        for (int64_t begin = 0; begin < width; begin += part_size) {
            F32 squares = zeros();
            by_vectors(part_size, [&](int64_t i, auto part) {
                F32 x = load_part(y + begin + i, part);
                if (layer_.gate_first) {
                    x = mul(x, gate(begin + i, part));
                    store_part(y + begin + i, x, part);
                }
                squares = fma(x, x, squares);
            });
            const float mean = sum(squares) / static_cast<float>(part_size);
            const F32 inverse = splat(1.0f / __builtin_sqrtf(mean + layer_.norm_eps));
            const T *weights = weight + begin % layer_.norm_weights;
            by_vectors(part_size, [&](int64_t i, auto part) {
                F32 x =
                    mul(mul(load_part(y + begin + i, part), inverse), load_part(weights + i, part));
                if (!layer_.gate_first) x = mul(x, gate(begin + i, part));
                store_part(out + begin + i, x, part);
            });
        }
    }

    const RecurrenceCall &call_;
    const Recurrence &layer_;
    TeamThread &team_;
};

static constexpr int RECURRENCE_PHASES = 3;

static void recurrence_phases(const RecurrenceCall &call, TeamThread &team) {
    if (call.layer->dtype == Dtype::bf16) RecurrenceRun<bf16>(call, team).run();
    else RecurrenceRun<float>(call, team).run();
}

// A whole call, with a team of its own.
static void recurrence_call(const RecurrenceCall &call, int threads) {
    Phase phases[RECURRENCE_PHASES] = {};
    in_team(threads, phases, [&](TeamThread &team) { recurrence_phases(call, team); });
}

}  // namespace ISA_NS
