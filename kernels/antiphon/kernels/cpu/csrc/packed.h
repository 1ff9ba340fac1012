// A packed linear as both sides of the table know it; see gemm.h for what a panel holds.

#pragma once

#include <cstdint>

// What the model computes in: of activations, biases and outputs.
enum class Dtype : int { bf16, f32 };

// How weights are kept.
enum class Weights : int {
    bf16,          // panels [K / 2][32][2], activations are bf16
    f32,           // panels [K][32], activations are f32
    int8,          // panels [K / 4][32][4] and a scale an output; activations as they are,
                   // or, on AMX, cut to 16 bits
    int8_dynamic,  // the same, unsigned with 128 added; activations are cut to 8 bits
    grouped,       // codes of a few bits and scales of groups of inputs: see Grouping
};

// How scales and minimums of groups are kept: as bf16 only where they are powers of two.
enum class ScaleDtype : int { f16, bf16, f32 };

// Weights value(code) * scale + minimum, where a group of inputs shares scale and minimum.
//
// A panel holds its groups one after the other: the scales of its 32 outputs, their minimums if
// there are any, and the codes, so that it is read front to back. Codes of eight inputs of an
// output are a word: input 2 j at bit 4 j, input 2 j + 1 at bit 16 + 4 j. Of codes of 5 and 6 bits
// these are the lower four; the upper ones of 32 or of 16 inputs follow as a word in the same
// order. Codes of 8 bits are signed numbers, laid out as in `int8`.
struct Grouping {
    int64_t bits;            // of a code: 4, 5, 6 or 8
    int64_t group;           // inputs of a group; the last one may have fewer
    ScaleDtype scales;       // of scales and minimums
    bool minimums;           // whether there are minimums; else they are zero
    const uint16_t *values;  // in bf16, of each code; null: codes of 8 bits are their values
};

// What becomes of the products.
enum class Epilogue : int {
    store,    // y in the number format of the model
    widen,    // y in float32, not rounded
    gate,     // y[:, i] = activation(gate[i]) * up[i]; of a linear whose `halves` is set
    activate  // y is an activation of the products, rounded before
};

// Functions of single numbers (activation.h); or, between gate and up of experts alone, the clamped
// swish of gpt-oss.
enum class Activation : int {
    silu,
    gelu,
    gelu_tanh,
    quick_gelu,
    relu,
    relu_squared,
    tanh,
    clamped_swish
};

// y (rows, outputs) = x (rows, inputs) W^T + bias. Plain data; its creator owns the memory.
struct PackedLinear {
    Weights weights;
    Dtype dtype;
    bool halves;  // a panel holds 16 outputs of the first half beside 16 of the second
    int64_t inputs, outputs;
    const void *panels;
    const float *scales;  // int8: of each output, in panel order, padded to whole panels
    const float *bias;    // likewise; or null
    Grouping grouping;    // of `grouped`
    Activation activation = Activation::silu;  // of the epilogues with one
    float gate_scale = 1.0f;                   // of a gate before its activation
};

// y (rows, heads, outputs), outputs side by side, each head by a linear of its own; all have the same
// shape.
struct HeadLinearsCall {
    const PackedLinear *const *linears;  // (heads,)
    int64_t heads, rows;
    const void *x;                    // (rows, heads, inputs), inputs side by side
    int64_t x_stride, x_head_stride;  // of a row and of a head, in numbers
    void *y;
    int64_t y_stride, y_head_stride;
};

// Inputs whose codes are laid out together: groups are multiples of it.
inline int64_t code_unit(int64_t bits) { return bits == 5 ? 32 : bits == 6 ? 16 : 8; }

// Bytes of the scales, and of the minimums, of a group in a panel.
inline int64_t scales_bytes(const Grouping &grouping) {
    return 32 * (grouping.scales == ScaleDtype::f32 ? 4 : 2);
}

inline int64_t group_bytes(const Grouping &grouping, int64_t inputs) {
    return scales_bytes(grouping) * (grouping.minimums ? 2 : 1) + 4 * grouping.bits * inputs;
}

inline int64_t grouped_panel_bytes(const Grouping &grouping, int64_t inputs) {
    const int64_t rest = inputs % grouping.group;
    return inputs / grouping.group * group_bytes(grouping, grouping.group) +
        (rest ? group_bytes(grouping, rest) : 0);
}

// Rows of numbers that become lanes of panels of a linear, so many lanes of each.
struct PackCall {
    const PackedLinear &linear;
    const void *rows;  // (count * lanes, width)
    Dtype dtype;       // of them; of a linear that is not quantized, its own
    int64_t count, lanes;
    int64_t width;  // inputs, and of a linear that is not quantized zeros up to a whole group
    void *panels;   // the first lane of the first panel
    float *scales;  // likewise; null: rows are kept as they are
};

// Rows of codes that become lanes of panels of a linear whose weights are `grouped`.
struct PackGroupsCall {
    const PackedLinear &linear;
    const uint8_t *codes;  // (count * lanes, inputs)
    const void *scales;    // (count * lanes, groups), as they are kept
    const void *minimums;  // likewise; or null
    int64_t count, lanes;
    char *panels;  // the first panel
    int64_t lane;  // the first lane of each
};
