// What each instruction set offers the bindings: one table of functions an ISA.

#pragma once

#include <cstdint>

#include "packed.h"
#include "packed_experts.h"
#include "paged.h"
#include "recurrence.h"

struct Table {
    const char *isa;

    // chunks.h
    void (*linear)(
        const PackedLinear &linear, const void *x, int64_t rows, void *y, Epilogue epilogue,
        int threads);
    void (*linear_rows)(
        const PackedLinear &linear, const int64_t *outputs, int64_t count, void *y, int threads);

    // head_linears.h
    void (*head_linears)(const HeadLinearsCall &call, int threads);

    // pack.h
    void (*pack)(const PackCall &call, int threads);
    void (*pack_groups)(const PackGroupsCall &call, int threads);

    // elementwise.h
    void (*norm)(const NormCall &call, int threads);
    void (*gate)(
        Dtype dtype, Activation activation, const void *gate_up, int64_t rows, int64_t width,
        void *out, int threads);
    void (*activate)(
        Dtype dtype, Activation activation, const void *x, int64_t size, void *out, int threads);
    void (*cap)(float *x, int64_t size, float cap, int threads);
    void (*sigmoid_mul)(
        Dtype dtype, const void *x, const void *gate, int64_t stride, int64_t rows, int64_t size,
        void *out, int threads);
    void (*qk_norm_rope_store)(const QkNormRopeCall &call, int64_t tokens, int threads);

    // scan.h
    void (*finite)(
        Dtype dtype, const void *x, int64_t rows, int64_t size, bool *finite, int threads);
    void (*argmax)(const float *x, int64_t rows, int64_t size, int64_t *found, int threads);

    // attention.h
    void (*attention)(
        const AttentionCall &call, const AttentionTask *tasks, int64_t count,
        const AttentionMerge *merges, int64_t merge_count, int threads);

    // experts.h
    void (*experts)(const ExpertsCall &call, int threads);

    // recurrent.h
    void (*recurrence)(const RecurrenceCall &call, int threads);

    // stack.h
    void (*stack)(const StackCall &call, int threads);
};

extern const Table table_amx;
extern const Table table_avx512bf16;
extern const Table table_avx512;
extern const Table table_avx2;
