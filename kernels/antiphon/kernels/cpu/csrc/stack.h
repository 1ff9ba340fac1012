// All layers of a step in one region: between two layers lies a wait, not a return to Python.
//
// The phases call what the single operations call, with the same roundings in between, so that a
// row has the same bits either way.

#pragma once

#include "attention_call.h"
#include "chunks.h"
#include "elementwise.h"
#include "experts.h"
#include "scan.h"
#include "simd.h"
#include "team.h"

namespace ISA_NS {

// So few rows are normalised by the thread that finishes the linear before; more are shared out.
static constexpr int64_t ROWS_IN_PASSING = 4;

// Phases of a stack of so many layers, at most: seven a layer and its experts', the first norm, and
// for logits the choice of hidden states, the head and a look at what it gave.
static constexpr int64_t stack_phases(int64_t layers) { return (7 + EXPERTS_PHASES) * layers + 4; }

class StackRun {
  public:
    StackRun(const StackCall &call, TeamThread &team) : call_(call), team_(team) {}

    void run() {
        enter();
        for (int64_t i = 0; i < call_.count; ++i) {
            const StackLayer &layer = call_.layers[i];
            const PackedLinear *next = i + 1 < call_.count ? &call_.layers[i + 1].qkv : head();
            const Epilogue epilogue =
                layer.gate_up.halves ? Epilogue::silu_mul : Epilogue::activate;
            linear(product(layer.qkv, block_input(), call_.heads), &layer.out);
            attention(layer);
            const PackedLinear *after = layer.experts ? nullptr : &layer.gate_up;
            linear_and_norm(
                product(layer.out, call_.mixed, call_.added), norm_within(layer), after);
            if (layer.experts != nullptr) {
                experts(layer, i);
                continue;
            }
            linear(product(layer.gate_up, block_input(), call_.gated, epilogue), &layer.down);
            linear_and_norm(product(layer.down, call_.gated, call_.added), norm_behind(i), next);
        }
        if (call_.ends != nullptr && call_.ends->count > 0) score(*call_.ends);
    }

  private:
    // What linears read: the norm of the stream, or the stream, which is the last norm itself.
    void *block_input() const { return call_.post_norms ? call_.residual : call_.normed; }

    // The norm before all layers, where norms come before the blocks.
    NormCall first_norm() const {
        NormCall first = norm(call_.layers[0].attention_norm, call_.normed, nullptr);
        first.x = call_.residual;
        first.residual = nullptr;
        return first;
    }

    // The norm between the blocks of a layer.
    NormCall norm_within(const StackLayer &layer) const {
        const StackNorm &own = call_.post_norms ? layer.attention_norm : layer.mlp_norm;
        return norm(own, block_input(), nullptr);
    }

    // The norm behind layer `i`.
    NormCall norm_behind(int64_t i) const {
        const bool last = i + 1 == call_.count;
        const StackNorm &own = last ? call_.final_norm
            : call_.post_norms      ? call_.layers[i].mlp_norm
                                    : call_.layers[i + 1].attention_norm;
        return norm(own, last ? call_.out : block_input(), last ? call_.finite : nullptr);
    }

    // The norm of the stream and what a block has added.
    NormCall norm(const StackNorm &norm, void *out, bool *finite) const {
        return {
            .kind = call_.norm,
            .dtype = call_.dtype,
            .rows = call_.tokens,
            .size = call_.hidden,
            .x = call_.added,
            .residual = call_.residual,
            .weight = norm.weight,
            .bias = norm.bias,
            .eps = call_.eps,
            .total = call_.post_norms ? call_.added : call_.residual,
            .out = out,
            .finite = finite,
        };
    }

    void norm_rows(const NormCall &norm, int64_t first, int64_t last) const {
        for (int64_t row = first; row < last; ++row) norm_one(norm, row);
    }

    void norm_phase(const NormCall &norm) {
        in_blocks(norm_block(), [&](int64_t first, int64_t last) { norm_rows(norm, first, last); });
    }

    // Of many rows some that follow each other, so that those to come can be asked for.
    int64_t norm_block() const { return call_.tokens < 128 ? 2 : 8; }

    // Embed, if ids are given, and normalise for the first block.
    void enter() {
        if (call_.ends == nullptr && call_.post_norms) return;
        in_blocks(norm_block(), [&](int64_t first, int64_t last) {
            for (int64_t token = first; call_.ends != nullptr && token < last; ++token)
                embed(*call_.ends, token);
            if (!call_.post_norms) norm_rows(first_norm(), first, last);
        });
    }

    void embed(const StackEnds &ends, int64_t token) const {
        const int64_t id = ends.ids[token];
        void *to = row_of(call_.residual, token);
        if (ends.embedding == nullptr) std::memcpy(to, row_of(ends.table, id), row_bytes());
        else if (call_.dtype == Dtype::bf16)
            linear_row(*ends.embedding, id, static_cast<bf16 *>(to));
        else linear_row(*ends.embedding, id, static_cast<float *>(to));
    }

    int64_t row_bytes() const { return call_.hidden * (call_.dtype == Dtype::bf16 ? 2 : 4); }
    void *row_of(void *rows, int64_t i) const {
        return static_cast<char *>(rows) + i * row_bytes();
    }
    const void *row_of(const void *rows, int64_t i) const {
        return static_cast<const char *>(rows) + i * row_bytes();
    }

    // The head, where every token's logits are wanted: it has as many rows as the linear before.
    const PackedLinear *head() const {
        const bool next = call_.ends != nullptr && call_.ends->count == call_.tokens;
        return next ? call_.ends->head : nullptr;
    }

    // Logits of the wanted tokens, and what is to be known of them.
    void score(const StackEnds &ends) {
        const void *x = call_.out;
        if (ends.count < call_.tokens) {
            x = ends.gathered;
            team_.run(ends.count, [&](int64_t i) {
                std::memcpy(
                    row_of(ends.gathered, i), row_of(call_.out, ends.logit_indices[i]),
                    row_bytes());
            });
        }
        linear({*ends.head, x, ends.count, ends.logits, Epilogue::widen}, nullptr);
        const int64_t parts = scan_parts(ends.head->outputs);
        team_.run(
            ends.count * parts,
            [&](int64_t i) {
                const int64_t size = ends.head->outputs, begin = i % parts * SCAN_PART;
                const int64_t left = size - begin;
                ends.parts[i] = scan_part(
                    ends.logits + i / parts * size, begin, left < SCAN_PART ? left : SCAN_PART);
            },
            [&] {
                for (int64_t row = 0; row < ends.count; ++row)
                    join_parts(ends.parts + row * parts, parts, ends.finite[row], ends.argmax[row]);
            });
    }

    // Share out blocks of tokens.
    template <class Body> void in_blocks(int64_t block, Body &&body) {
        const int64_t tokens = call_.tokens;
        team_.run(ceil_div(tokens, block), [&](int64_t chunk) {
            const int64_t end = (chunk + 1) * block;
            body(chunk * block, end < tokens ? end : tokens);
        });
    }

    LinearCall product(
        const PackedLinear &linear, const void *x, void *y,
        Epilogue epilogue = Epilogue::store) const {
        return {linear, x, call_.tokens, y, epilogue};
    }

    // A chunk, while the memory is asked for the next, or for the first of the `next` linear.
    void chunk(LinearCall &call, int64_t i, const PackedLinear *next) const {
        call.chunk(i, call.prefetch(i, team_.threads(), next));
    }

    void linear(LinearCall call, const PackedLinear *next) {
        team_.run(call.chunks(), [&](int64_t i) { chunk(call, i, next); });
    }

    void linear_and_norm(LinearCall call, const NormCall &norm, const PackedLinear *next) {
        if (call_.tokens > ROWS_IN_PASSING) {
            linear(call, next);
            norm_phase(norm);
        } else {
            team_.run(
                call.chunks(), [&](int64_t i) { chunk(call, i, next); },
                [&] { norm_rows(norm, 0, call_.tokens); });
        }
    }

    // The experts of layer `i`, and the norm after it.
    void experts(const StackLayer &layer, int64_t i) {
        if (call_.dtype == Dtype::bf16) experts_as<bf16>(layer, i);
        else experts_as<float>(layer, i);
    }

    template <class T> void experts_as(const StackLayer &layer, int64_t i) {
        const NormCall norm = norm_behind(i);
        const ExpertsCall call = {
            .experts = layer.experts,
            .tokens = call_.tokens,
            .x = block_input(),
            .out = call_.added,
            .room = call_.experts_rooms[i],
            .plan = call_.experts_plans + i,
        };
        ExpertsRun<T> run(call, team_);
        const auto sum_and_norm = [&](int64_t first, int64_t last) {
            for (int64_t token = first; token < last; ++token) run.sum_token(token);
            norm_rows(norm, first, last);
        };
        if (call_.tokens <= ROWS_IN_PASSING) {
            run.run([&] { sum_and_norm(0, call_.tokens); });
        } else {
            run.run();
            in_blocks(norm_block(), sum_and_norm);
        }
    }

    void attention(const StackLayer &layer) {
        const StackGroup &group = call_.groups[layer.group];
        const LayerCache &cache = layer.cache.keys ? layer.cache : call_.pass_cache;
        const int64_t stride = layer.qkv.outputs;
        const QkNormRopeCall heads = {
            .shape = group.shape,
            .cache = cache,
            .places = group.places,
            .heads = call_.heads,
            .cos = call_.cos,
            .sin = call_.sin,
            .rotated = call_.rotated,
            .positions = call_.positions,
            .query_norm = layer.query_norm,
            .key_norm = layer.key_norm,
            .eps = call_.eps,
            .q = call_.heads,
            .q_stride = stride,
        };
        const AttentionCall attention = {
            .shape = group.shape,
            .rows = group.rows,
            .cache = cache,
            .scale = call_.scale,
            .q = call_.heads,
            .q_stride = stride,
            .out = call_.mixed,
            .partials = group.partials,
        };
        // A query that one task reads alone is readied there.
        const bool in_passing = call_.one_each && group.merge_count == 0;
        if (!in_passing)
            in_blocks(8, [&](int64_t first, int64_t last) {
                for (int64_t token = first; token < last; ++token)
                    qk_norm_rope_store_token(heads, token, 0, group.shape.heads);
            });
        team_.run(group.count, [&](int64_t i) {
            const AttentionTask &task = group.tasks[i];
            if (in_passing) qk_norm_rope_store_token(heads, task.token, task.head, 1);
            attention_task(attention, group.tasks, group.count, i, team_.threads());
        });
        team_.run(
            group.merge_count, [&](int64_t i) { attention_merge(attention, group.merges[i]); });
    }

    const StackCall &call_;
    TeamThread &team_;
};

static void stack_call(const StackCall &call, int threads) {
    static thread_local Scratch scratch;
    const size_t bytes = stack_phases(call.count) * sizeof(Phase);
    auto *phases = static_cast<Phase *>(scratch.reserve(bytes));
    std::memset(phases, 0, bytes);
    in_team(threads, phases, [&](TeamThread &team) { StackRun(call, team).run(); });
}

}  // namespace ISA_NS
