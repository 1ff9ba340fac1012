// A layer with a recurrence over states as both sides of the table know it; see recurrent.h.

#pragma once

#include <cstdint>

#include "packed.h"

// Taps of a convolution, at most.
constexpr int64_t CONV_TAPS_MAX = 16;

enum class RecurrenceKind : int { ssd, gated_delta };

// Axes: Y key heads, which of an ssd are the groups that share B and C, each of H / Y value heads;
// a head's state has `rows` (N or K) by `columns` (P or V) numbers. C channels are convolved.
//
// A token's projection is, of an ssd, gate (H P), x (H P), B (Y N), C (Y N), step (H); of a gated
// delta net, q (Y K), k (Y K), v (H V), gate (H V), learning (H), forgetting (H). Plain data; its
// creator owns the memory.
struct Recurrence {
    RecurrenceKind kind;
    Dtype dtype;
    int64_t key_heads, heads, rows, columns, taps;
    const void *conv;        // (taps, C), the last tap is the token itself
    const void *conv_bias;   // (C,), or null
    const float *decay_log;  // (H,) of the rate by which a state decays
    const float *step_bias;  // (H,)
    const float *skip;       // (H,) of an ssd
    float step_min, step_max;
    const void *scales;  // (inputs,) what is projected is multiplied by them; or null
    // The norm behind the recurrence, of parts of so many numbers, whose weights (norm_weights,)
    // repeat; without a weight there is only the gate.
    const void *norm;
    int64_t norm_part, norm_weights;
    float norm_eps;
    bool gate_first;  // the gate multiplies what is normalised, not the result

    int64_t width() const { return heads * columns; }
    int64_t channels() const { return width() + 2 * key_heads * rows; }
    int64_t rates() const { return kind == RecurrenceKind::ssd ? heads : 2 * heads; }
    int64_t inputs() const { return width() + channels() + rates(); }
    // Where the parts of a token's projection begin.
    int64_t convolved_at() const { return kind == RecurrenceKind::ssd ? width() : 0; }
    int64_t gate_at() const { return kind == RecurrenceKind::ssd ? 0 : channels(); }
    int64_t rates_at() const { return width() + channels(); }
    // Numbers of the states of one sequence.
    int64_t conv_state() const { return (taps - 1) * channels(); }
    int64_t state() const { return heads * rows * columns; }
};

// A row of a pass: `count` tokens from `token` on. The state before it is `read`, or negative: zero;
// that after its last token, or where there are several that after each, goes to `writes`. No row
// reads what a row of the same pass writes.
struct StateRow {
    int64_t token, count;
    int64_t read;
    const int32_t *writes;
    bool several;
};

// Room of a call.
struct RecurrenceRoom {
    float *mixed;  // (T, C) what is convolved
    float *rates;  // (T, 2 H) factors of states, and how much a token writes
    float *y;      // (T, H * columns) what the recurrence gives

    // Numbers of the room of a call of so many tokens, and the same laid out.
    static int64_t size(const Recurrence &layer, int64_t tokens) {
        return tokens * (layer.channels() + 2 * layer.heads + layer.width());
    }
    static RecurrenceRoom at(float *memory, const Recurrence &layer, int64_t tokens) {
        float *rates = memory + tokens * layer.channels();
        return {.mixed = memory, .rates = rates, .y = rates + tokens * 2 * layer.heads};
    }
};

// The rows of a pass as the layers of one group of states see them.
struct StateRows {
    const StateRow *rows;
    int64_t count;
    const int32_t *token_rows;  // (T,) the row of each token
};

struct RecurrenceCall {
    const Recurrence *layer;
    int64_t tokens;
    StateRows rows;
    const void *projected;  // (T, inputs)
    void *conv_states;      // (S, taps - 1, C) the last inputs of the convolution
    float *states;          // (S, H, rows, columns)
    RecurrenceRoom room;
    void *out;  // (T, H * columns)
};
