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
};

// What becomes of the products.
enum class Epilogue : int {
    store,     // y in the number format of the model
    widen,     // y in float32, not rounded
    silu_mul,  // y[:, i] = silu(gate[i]) * up[i]; of a linear whose `halves` is set
    activate   // y is an activation of the products, rounded before
};

// Functions of single numbers (activation.h); or, between gate and up of experts alone, the clamped
// swish of gpt-oss.
enum class Activation : int { silu, gelu, gelu_tanh, relu, relu_squared, tanh, clamped_swish };

// y (rows, outputs) = x (rows, inputs) W^T + bias. Plain data; its creator owns the memory.
struct PackedLinear {
    Weights weights;
    Dtype dtype;
    bool halves;  // a panel holds 16 outputs of the first half beside 16 of the second
    int64_t inputs, outputs;
    const void *panels;
    const float *scales;  // int8: of each output, in panel order, padded to whole panels
    const float *bias;    // likewise; or null
    Activation activation = Activation::silu;  // of the epilogue that activates
};

// y (rows, heads, outputs), each head by a linear of its own; all have the same shape.
struct HeadLinearsCall {
    const PackedLinear *const *linears;  // (heads,)
    int64_t heads, rows;
    const void *x;                    // (rows, heads, inputs), inputs side by side
    int64_t x_stride, x_head_stride;  // of a row and of a head, in numbers
    void *y;
};

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
