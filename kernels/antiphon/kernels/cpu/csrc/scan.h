// Looking through rows: for what is not finite, and for the greatest.

#pragma once

#include "elementwise.h"
#include "simd.h"
#include "vectors.h"

namespace ISA_NS {

// Whether all numbers of a row are finite: each times zero is zero, or else NaN.
template <class T> INLINE bool is_finite(const T *x, int64_t size) {
    F32 sums = zeros();
    by_vectors(
        size, [&](int64_t i, auto part) { sums = fma(load_part(x + i, part), zeros(), sums); });
    return sum(sums) == 0.0f;
}

// The first of the greatest of a row; of a row with a NaN, any.
INLINE int64_t argmax_row(const float *x, int64_t size) {
    constexpr int64_t BLOCK = 16 * LANES;
    float best = -__builtin_inff();
    int64_t found = 0;
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        const int64_t end = begin + BLOCK < size ? begin + BLOCK : size;
        F32 most = splat(best);
        int64_t i = begin;
        for (; i + LANES <= end; i += LANES) most = max(most, load(x + i));
        float top = reduce_max(most);
        for (; i < end; ++i) top = x[i] > top ? x[i] : top;
        if (top > best) {
            best = top;
            found = begin;
        }
    }
    for (int64_t i = found; i < size; ++i)
        if (x[i] == best) return i;
    return found;
}

// `size` numbers of a row from `begin` on.
INLINE PartScan scan_part(const float *row, int64_t begin, int64_t size) {
    const int64_t index = begin + argmax_row(row + begin, size);
    return {row[index], static_cast<int32_t>(index), is_finite(row + begin, size)};
}

// What is so of a whole row: whether it is finite, and the first of its greatest.
INLINE void join_parts(const PartScan *parts, int64_t count, bool &finite, int32_t &argmax) {
    const PartScan *best = parts;
    finite = parts->finite;
    for (const PartScan *part = parts + 1; part < parts + count; ++part) {
        finite = finite && part->finite;
        if (part->max_value > best->max_value) best = part;
    }
    argmax = best->index;
}

static void finite_call(
    Dtype dtype, const void *x, int64_t rows, int64_t size, bool *finite, int threads) {
    by_rows(rows, size, threads, [&](int64_t row) {
        const int64_t at = row * size;
        finite[row] = dtype == Dtype::bf16 ? is_finite(static_cast<const bf16 *>(x) + at, size)
                                           : is_finite(static_cast<const float *>(x) + at, size);
    });
}

static void argmax_call(const float *x, int64_t rows, int64_t size, int64_t *found, int threads) {
    by_rows(
        rows, size, threads, [&](int64_t row) { found[row] = argmax_row(x + row * size, size); });
}

}  // namespace ISA_NS
