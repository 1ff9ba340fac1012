// Linears of heads: each head's part of a row by a linear of its own.

#pragma once

#include "chunks.h"
#include "packed.h"
#include "simd.h"
#include "team.h"

namespace ISA_NS {

// Some rows of one head.
template <class T> static void head_rows(
    const HeadLinearsCall &call, int64_t head, int64_t first, int64_t rows) {
    static thread_local Scratch scratch;
    const PackedLinear &linear = *call.linears[head];
    const int64_t inputs = linear.inputs, outputs = linear.outputs;
    const T *x = static_cast<const T *>(call.x) + first * call.x_stride + head * call.x_head_stride;
    T *y = static_cast<T *>(call.y) + first * call.y_stride + head * call.y_head_stride;
    const int64_t panels = panels_of(linear);
    if (rows == 1) {
        linear_block(linear, 0, panels, x, 0, 1, y, Epilogue::store, PrefetchRange());
        return;
    }
    T *in = static_cast<T *>(scratch.reserve(rows * (inputs + outputs) * sizeof(T)));
    T *out = in + rows * inputs;
    for (int64_t row = 0; row < rows; ++row)
        std::memcpy(in + row * inputs, x + row * call.x_stride, inputs * sizeof(T));
    linear_block(linear, 0, panels, in, 0, rows, out, Epilogue::store, PrefetchRange());
    for (int64_t row = 0; row < rows; ++row)
        std::memcpy(y + row * call.y_stride, out + row * outputs, outputs * sizeof(T));
}

static constexpr int64_t HEAD_ROWS = 48;  // of a chunk

INLINE int64_t head_chunks(const HeadLinearsCall &call) {
    return call.heads * ceil_div(call.rows, HEAD_ROWS);
}

static void head_chunk(const HeadLinearsCall &call, int64_t chunk) {
    const int64_t head = chunk % call.heads, first = chunk / call.heads * HEAD_ROWS;
    const int64_t left = call.rows - first, rows = left < HEAD_ROWS ? left : HEAD_ROWS;
    if (call.linears[head]->dtype == Dtype::bf16) head_rows<bf16>(call, head, first, rows);
    else head_rows<float>(call, head, first, rows);
}

static void head_linears_call(const HeadLinearsCall &call, int threads) {
    Phase phase = {};
    in_team(threads, &phase, [&](TeamThread &team) {
        team.run(head_chunks(call), [&](int64_t chunk) { head_chunk(call, chunk); });
    });
}

}  // namespace ISA_NS
