// A row of numbers as vectors, the last of which may be short.

#pragma once

#include "simd.h"

namespace ISA_NS {

// All lanes of a vector, or the first few at the end of a row.
struct Whole {};
struct Part {
    int count;
};
template <class T> INLINE F32 load_part(const T *p, Whole) { return load(p); }
template <class T> INLINE F32 load_part(const T *p, Part part) { return load(p, part.count); }
template <class T> INLINE void store_part(T *p, F32 a, Whole) { store(p, a); }
template <class T> INLINE void store_part(T *p, F32 a, Part part) { store(p, a, part.count); }

// Call `body(i, Whole or Part)` for each vector of a row.
template <class Body> INLINE void by_vectors(int64_t size, Body &&body) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) body(i, Whole());
    if (i < size) body(i, Part{static_cast<int>(size - i)});
}

}  // namespace ISA_NS
