// The paged cache, the rows of a pass and a stack of layers, as both sides of the table know them.
// Plain data; its creator owns the memory.
//
// Axes: R rows, T tokens of all rows, P pages, S tokens a page, H kv heads, G query heads a kv
// head, D head size, N entries of a page table.

#pragma once

#include <cstdint>

#include "packed.h"
#include "packed_experts.h"
#include "recurrence.h"

// What keys and values are kept as: as the model computes, or in eight bits (fp8.h).
enum class CacheFormat : int { model, e4m3, e5m2 };

// What is the same in every pass.
struct CacheShape {
    Dtype dtype;  // of queries, and of keys and values when they are not in eight bits
    CacheFormat format;
    int64_t pages, page_tokens, heads, queries_per_head, head_size;
    int64_t window;  // tokens that a query sees, itself included; 0: all
    // A query also sees what comes after it, as far as before; all tokens of a row are in the pass.
    bool bidirectional = false;
};

// One layer's cache (kv_layout.h), and the multiples of what is kept there that keys and values are:
// 1 unless they are in eight bits.
struct LayerCache {
    void *keys;
    void *values;  // null: values are keys, latents
    float key_scale, value_scale;
    // Numbers from a page to the next one, and from a head of a page to the next one, of both.
    int64_t page_step, head_step;

    // Where a head of a page begins, in numbers.
    int64_t head_at(int64_t page, int64_t head) const {
        return page * page_step + head * head_step;
    }
};

// Row r's tokens follow those of row r - 1; token p of row r lies in page
// tables[r * stride + p / S] at p % S.
struct PagedRows {
    int64_t rows, stride;
    const int32_t *tables;     // (R, N)
    const int32_t *query_len;  // (R,)
    const int32_t *kv_len;     // (R,) tokens that the row's last query sees, itself included
};

// Sums over keys are taken in segments of so many, counted from position 0, which are then added one
// after the other: so a long row may be shared out among threads, and has the bits of one that is not.
constexpr int64_t SEGMENT_KEYS = 512;

// Work of one thread: some queries of a row, some kv heads of them, and all of their keys or some
// segments. All heads of a block of keys are met before the next block, since they lie side by side.
struct AttentionTask {
    int32_t row, queries, head, heads;  // heads from `head` on
    int64_t token;                      // index of the first query in the pass
    int64_t position;                   // of the first query in its row
    int64_t key_begin, key_end;         // whole segments
    int64_t partial;       // the slot of its first segment; -1: its sums are the result
    int64_t partial_step;  // slots from a head's to the next one's
};

// What joins the segments of a query that has been shared out.
struct AttentionMerge {
    int32_t head;
    int64_t token, partial, segments;
};

// Softmax attention of each query over its row's keys, within the window, and causal unless the
// shape says otherwise.
struct AttentionCall {
    CacheShape shape;
    PagedRows rows;
    LayerCache cache;
    float scale;
    const void *q;  // token t's query heads begin at q + t * q_stride values
    int64_t q_stride;
    void *out;  // (T, G * H, D)
    // A slot has (G, D) sums in whole vectors, and the maximum and the weight of each.
    float *partials;
    float softcap = 0.0f;         // scores become softcap * tanh(score / softcap); 0: they stay
    const void *sinks = nullptr;  // (G * H,) a score of each query head that has no value; or null
};

// Floats of a slot; a vector has sixteen.
constexpr int64_t slot_floats(int64_t queries_per_head, int64_t head_size) {
    return queries_per_head * ((head_size + 15) / 16 * 16 + 2);
}

// Rows are scaled to unit root-mean-square, and rounded before the weight multiplies them or, where
// it is wide, behind that; or to zero mean and unit variance; or they stay.
enum class NormKind : int { rms, rms_wide, layer, none };

// Norms of queries and of keys before they are rotated; of kind `none` there are none.
struct QkNorms {
    NormKind kind;
    bool over_token;  // all heads of a token are normalised as one
    // (D,) of each head, or (G * H, D) and (H, D) of a token.
    const void *query, *query_bias, *key, *key_bias;
    float eps;
};

// Queries and keys are normalised where there are norms, and rotated; keys and values are kept.
struct QkNormRopeCall {
    CacheShape shape;
    LayerCache cache;
    const int64_t *places;     // (T,) page * page_slots(S) + offset of each token
    const void *heads;         // token t's (G * H + 2 H, D): queries, keys, values, begin at
    int64_t heads_stride;      // t * heads_stride values
    const void *cos, *sin;     // (positions, R), sin signed: negative in the first half
    int64_t rotated;           // R, the numbers at the start of each head that are rotated
    const int32_t *positions;  // (T,) the row of each token; null: token t has row t
    const float *query_scale;  // (positions,) what first multiplies queries; or null
    QkNorms norms;
    void *q;  // token t's rotated queries go to q + t * q_stride values; may be `heads`
    int64_t q_stride;
};

// Rows normalised; with a residual, their sum with x is. Of kind `none` there is no `out`.
struct NormCall {
    NormKind kind;
    Dtype dtype;
    int64_t rows, size;
    const void *x, *residual;  // (rows, size) both; residual null: x alone is normalised
    const void *weight,
        *bias;  // (size,) both, a wide weight in float32; of a layer norm both may be null
    float eps;
    void *total;   // (rows, size) x + residual, if there is one; may be `residual`, or x
    void *out;     // (rows, size); may be `residual`, if that is not `total`
    bool *finite;  // (rows,) whether a row's sum of squares is; or null
};

// Weight and bias of a norm, (hidden,) both; without a weight there is no norm.
struct StackNorm {
    const void *weight, *bias;
};

// The norms of a block: of the stream that it reads, which else it reads as it is; of its output; and
// of the sum of both, which then is the stream.
struct StackBlock {
    StackNorm before, after, with;
};

// A layer's recurrence with its linears, and the states that it continues; without a layer there is
// none.
struct StackRecurrence {
    const Recurrence *layer;
    PackedLinear in, out;
    void *conv_states;
    float *states;
    int64_t group;  // which rows it sees
};

// Latent attention in its absorbed form, in place of `qkv`: queries are projected to latents, which
// are keys and values of all Q heads. A layer's cache has one head, R + O numbers of a token. Without
// heads a layer has none.
struct StackLatent {
    PackedLinear query_down;  // to the queries' latent; or without inputs, and then
    const void *query_norm;   // that is not normalised
    PackedLinear query;       // to (Q, C + O)
    PackedLinear down;        // to R + O
    const void *norm;         // (R,)
    float query_eps, eps;
    const PackedLinear *const *absorb;   // (Q,) from C to R
    const PackedLinear *const *restore;  // (Q,) from R to V
    int64_t heads, content, position, latent, value;
    bool interleaved;  // pairs that are rotated lie side by side

    int64_t head_size() const { return latent + position; }
};

// Factors of what a mixer reads, and of what it gives.
struct MixerScales {
    float in, out;
};

// What a layer computes with; linears may have biases.
struct StackLayer {
    // Its mixers, whose outputs are added: attention, a recurrence, or both.
    bool attends;
    PackedLinear qkv, out;
    StackLatent latent;
    bool gated;  // behind queries, keys and values lie gates (G * H, D), whose sigmoids heads meet
    MixerScales attention_scales;
    StackRecurrence recurrence;
    MixerScales recurrence_scales;
    PackedLinear gate_up, down;    // gate_up in halves, or up alone, which is activated; or
    float mlp_scale;               // of what down gives
    const PackedExperts *experts;  // in their place; or null
    StackBlock attention_norms, mlp_norms;
    // Both blocks read the stream that enters the layer; without a norm before it, the feed-forward
    // block reads what attention reads.
    bool parallel;
    float multiplier;  // of what blocks add to the stream
    QkNorms head_norms;
    float scale;        // of scores
    float softcap;      // of scores; 0: none
    const void *sinks;  // (G * H,) scores without a value; or null
    int64_t rotary;     // which rotation of the call's
    int64_t group;      // which rows and shape it sees
    LayerCache cache;   // without keys: that of the pass
};

// What queries and keys have of their positions: cosines and sines, (positions, rotated) both, and
// factors of queries, (positions,), or null.
struct StackRotary {
    const void *cos, *sin;
    int64_t rotated;
    const float *query_scale;
};

// The rows of a pass as the layers of one cache group see them.
struct StackGroup {
    CacheShape shape;
    PagedRows rows;
    bool one_each;               // every row has one token
    const int64_t *places;       // (T,)
    const AttentionTask *tasks;  // longest first
    int64_t count;
    const AttentionMerge *merges;
    int64_t merge_count;
    float *partials;
};

// A row of logits is looked through in parts of so many.
constexpr int64_t SCAN_PART = 16384;
constexpr int64_t scan_parts(int64_t size) { return (size + SCAN_PART - 1) / SCAN_PART; }

// The greatest of a part of a row of logits, and whether all of the part are finite.
struct PartScan {
    float max_value;
    int32_t index;  // in the row
    bool finite;
};

// Token ids before the layers, and logits after them.
struct StackEnds {
    const int32_t *ids;             // (T,)
    const PackedLinear *embedding;  // its outputs' weights are the embeddings; or null, and
    const void *table;              // (V, hidden)
    float scale;                    // of embeddings
    const void *learned_positions;  // (positions, hidden), added to the embeddings; or null
    const PackedLinear *head;
    float logits_scale;
    float softcap;                 // logits become softcap * tanh(logit / softcap); 0: they stay
    const int32_t *logit_indices;  // (count,) tokens whose logits are wanted, rising
    int64_t count;
    float *logits;    // (count, V)
    bool *finite;     // (count,)
    int32_t *argmax;  // (count,) the first of the greatest
    // Room: (count, hidden), and parts of rows.
    void *gathered;
    PartScan *parts;
};

struct StackCall {
    Dtype dtype;
    const StackLayer *layers;
    int64_t count, hidden, tokens;
    NormKind norm;
    float eps;
    const StackGroup *groups;
    const StateRows *states;  // of each group of states
    const StackRotary *rotaries;
    const int32_t *positions;  // (T,)
    StackNorm final_norm;      // of the stream behind the last layer, which else is the result
    LayerCache pass_cache;     // of one layer after the other: nothing is kept
    void *residual;            // (T, hidden), overwritten
    void *out;                 // (T, hidden), normalised
    bool *finite;              // (T,)
    const StackEnds *ends;     // null: the residual stream is given, and no logits are wanted
    // Layers before which the stream is copied, ascending, to (T, aux_count, hidden).
    const int64_t *aux_layers;
    int64_t aux_count;
    void *aux;
    // Room: normed and added (T, hidden), heads (T, G * H + 2 H, D), mixed (T, G * H, D),
    // gated (T, width); and what attention adds beside a parallel block, (T, hidden).
    void *normed, *added, *heads, *mixed, *gated, *attended;
    // Of layers with two mixers what attention gives, (T, hidden); where a mixer's input has a
    // factor, that, (T, hidden); of recurrences what is projected, (T, inputs), and their room.
    void *branch, *scaled, *projected;
    float *recurrence_room;
    // Of latent attention: queries' latents (T, their size), tokens' (T, R + O), absorbed queries
    // (T, Q, R + O) and values (T, Q, V).
    void *query_latents, *latents, *absorbed, *values;
    // Of each layer; those without experts have no room.
    const ExpertsRoom *experts_rooms;
    ExpertsPlan *experts_plans;
};
