// Weights as a checkpoint has them, rows of numbers, become lanes of panels (packed.h).
//
// Sixteen rows at a time are turned into columns by their 32-bit words; what is kept in bytes is
// rounded on the way, each output to multiples of a 127th of its greatest weight.

#pragma once

#include "gemm.h"
#include "layout.h"
#include "simd.h"
#include "team.h"
#include "vectors.h"

namespace ISA_NS {

// Lay `words` words of sixteen rows into a panel whose words have `lanes` lanes.
INLINE void lay_words(
    const char *rows, int64_t row_bytes, int64_t words, uint32_t *panel, int64_t lanes) {
    const float *each[LANES];  // words are moved, whatever they hold
    for (int r = 0; r < LANES; ++r) each[r] = reinterpret_cast<const float *>(rows + r * row_bytes);
    transpose<float>(each, words, panel, lanes);
}

// The same of a few rows.
INLINE void pack_tail_rows(
    const char *rows, int64_t count, int64_t row_bytes, int64_t words, int word_bytes,
    char *panel) {
    for (int64_t r = 0; r < count; ++r)
        for (int64_t w = 0; w < words; ++w)
            std::memcpy(
                panel + (w * PANEL + r) * word_bytes, rows + r * row_bytes + w * word_bytes,
                word_bytes);
}

// A row as bytes, zero beyond its end, and its scale.
template <class T>
INLINE void quantize_row(const T *x, int64_t inputs, int added, int8_t *bytes, float *scale) {
    F32 top = zeros();
    by_vectors(
        inputs, [&](int64_t i, auto part) { top = magnitude_max(top, load_part(x + i, part)); });
    *scale = max_magnitude(top) / 127.0f;
    const F32 step = splat(*scale > 0.0f ? *scale : 1.0f);
    by_vectors(inputs, [&](int64_t i, auto part) {
        store_bytes(bytes + i, add(to_int(div(load_part(x + i, part), step)), splat_int(added)));
    });
    std::memset(bytes + inputs, 0, byte_stride(inputs) - inputs);
}

template <class T>
static void pack_bytes(const PackCall &call, const T *rows, char *panel, float *scales) {
    static thread_local Scratch scratch;
    const int64_t inputs = call.width, stride = byte_stride(inputs);
    const bool dynamic = call.linear.weights == Weights::int8_dynamic;
    constexpr int GROUP = 4;
    const int64_t words = ceil_div(inputs, GROUP);
    auto *bytes = static_cast<int8_t *>(scratch.reserve(LANES * stride));
    for (int64_t lane = 0; lane < call.lanes; lane += LANES) {
        const int64_t count = call.lanes - lane < LANES ? call.lanes - lane : LANES;
        for (int64_t r = 0; r < count; ++r)
            quantize_row(
                rows + (lane + r) * inputs, inputs, dynamic ? 128 : 0, bytes + r * stride,
                scales + lane + r);
        const auto *from = reinterpret_cast<const char *>(bytes);
        char *to = panel + lane * GROUP;
        if (count < LANES) pack_tail_rows(from, count, stride, words, GROUP, to);
        else lay_words(from, stride, words, reinterpret_cast<uint32_t *>(to), PANEL);
    }
}

static void pack_words(const PackCall &call, const char *rows, char *panel) {
    const int64_t words = call.width * (call.dtype == Dtype::bf16 ? 2 : 4) / 4;
    for (int64_t lane = 0; lane < call.lanes; lane += LANES) {
        const int64_t count = call.lanes - lane < LANES ? call.lanes - lane : LANES;
        const char *from = rows + lane * words * 4;
        char *to = panel + lane * 4;
        if (count < LANES) pack_tail_rows(from, count, words * 4, words, 4, to);
        else lay_words(from, words * 4, words, reinterpret_cast<uint32_t *>(to), PANEL);
    }
}

// One panel of a call.
static void pack_one(const PackCall &call, int64_t index) {
    const int64_t numbers = index * call.lanes * call.width;
    char *panel = static_cast<char *>(call.panels) + index * panel_bytes(call.linear);
    if (call.scales == nullptr) {
        const int64_t bytes = call.dtype == Dtype::bf16 ? 2 : 4;
        pack_words(call, static_cast<const char *>(call.rows) + numbers * bytes, panel);
    } else if (call.dtype == Dtype::bf16) {
        const auto *rows = static_cast<const bf16 *>(call.rows) + numbers;
        pack_bytes(call, rows, panel, call.scales + index * PANEL);
    } else {
        const auto *rows = static_cast<const float *>(call.rows) + numbers;
        pack_bytes(call, rows, panel, call.scales + index * PANEL);
    }
}

static void pack_call(const PackCall &call, int threads) {
    Phase phase = {};
    in_team(call.count > 1 ? threads : 1, &phase, [&](TeamThread &team) {
        team.run(call.count, [&](int64_t index) { pack_one(call, index); });
    });
}

}  // namespace ISA_NS
