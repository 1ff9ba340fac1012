// A mixture of experts as both sides of the table know it; experts.h computes it.
// Plain data; its creator owns the memory.
//
// Axes: T tokens, E experts, H of them held here, K experts chosen for a token, W their width, S that
// of the shared one.

#pragma once

#include <cstdint>

#include "packed.h"

// How router logits choose experts; kernels/routing.py says what each field means.
struct Routing {
    int64_t top_k;
    bool sigmoid;  // scores; else softmax
    bool renormalised;
    float factor;
    int64_t groups, groups_kept, group_best;
};

struct PackedExpert {
    PackedLinear gate_up, down;  // gate_up in halves
};

// out = sum over chosen experts that are held here of share * expert(x), and the shared expert's.
struct PackedExperts {
    Dtype dtype;
    int64_t hidden, width, count;
    int64_t first, held;  // of all experts, those that are here
    Routing routing;
    PackedLinear router;              // (E, hidden) float32, of whatever dtype the rest is
    const float *correction;          // (E,) added to scores where experts are chosen; or null
    const PackedExpert *experts;      // (H,)
    Activation activation;            // activation(gate) * up, or the clamped swish
    float alpha, limit;               // of the clamped swish
    bool share_on_input;              // shares multiply what goes in, not what comes out
    const PackedExpert *shared;       // takes every token, with silu; or null
    const PackedLinear *shared_gate;  // one output, whose sigmoid scales the shared one; or null
};

// Rows by one linear, cut into chunks: blocks of rows by groups of panels.
struct ExpertJob {
    const PackedLinear *linear;
    const void *x;  // null: rows are those of the tokens whose pairs they are
    void *y;
    Epilogue epilogue;
    int64_t row, rows;  // of x and y
    int64_t block_rows = 0, blocks = 0, panels = 0, groups = 0;
    int64_t first_chunk = 0;
};

// Jobs of one phase.
struct ExpertJobs {
    ExpertJob *jobs;
    int64_t count, chunks;
};

// How a call is cut, as is found out within it: gate and up, and down. Another call in the same
// region has its own: a thread that comes late must find how many chunks there were.
struct ExpertsPlan {
    ExpertJobs phases[2];
};

// Room of a call, which a later one may have again. A row is a pair of a token and a choice; rows
// are sorted by expert.
struct ExpertsRoom {
    float *logits;         // (T, E)
    int32_t *chosen;       // (T, K), the best first
    float *shares;         // (T, K)
    int32_t *row_of_pair;  // (T, K)
    int32_t *pair_of_row;  // (T * K,)
    int32_t *bounds;       // (E + 1,) where the rows of each expert begin
    void *gated;           // (T * K, W)
    void *made;            // (T * K, hidden)
    void *shared_gated;    // (T, S)
    void *shared_made;     // (T, hidden)
    void *shared_scale;    // (T, 1)
    ExpertJob *jobs;       // (2, E + 2)
};

struct ExpertsCall {
    const PackedExperts *experts;
    int64_t tokens;
    const void *x;  // (T, hidden)
    void *out;      // (T, hidden)
    ExpertsRoom room;
    ExpertsPlan *plan;
};
