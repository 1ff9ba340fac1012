// All layers of a step in one region: between two layers lies a wait, not a return to Python.
//
// The phases call what the single operations call, with the same roundings in between, so that a
// row has the same bits either way.

#pragma once

#include "attention_call.h"
#include "chunks.h"
#include "elementwise.h"
#include "experts.h"
#include "head_linears.h"
#include "recurrent.h"
#include "scan.h"
#include "simd.h"
#include "team.h"

namespace ISA_NS {

// So few rows are normalised by the thread that finishes the linear before; more are shared out.
static constexpr int64_t ROWS_IN_PASSING = 4;

// Phases of a stack of so many layers, at most: eight a layer and a copy of the stream before it,
// four and its own of a recurrence, and its experts'; the first norm, and for logits the choice of
// hidden states, the head and a look at what it gave.
static constexpr int64_t stack_phases(int64_t layers) {
    return (13 + RECURRENCE_PHASES + EXPERTS_PHASES) * layers + 4;
}

class StackRun {
  public:
    StackRun(const StackCall &call, TeamThread &team) : call_(call), team_(team) {}

    void run() {
        enter();
        for (int64_t i = 0, aux = 0; i < call_.count; ++i) {
            const StackLayer &layer = call_.layers[i];
            if (aux < call_.aux_count && call_.aux_layers[aux] == i) copy_stream(aux++);
            const PackedLinear *next =
                i + 1 < call_.count ? &first_linear(call_.layers[i + 1]) : head();
            const PackedLinear *within = layer.experts ? nullptr : &layer.gate_up;
            const Epilogue epilogue = layer.gate_up.halves ? Epilogue::gate : Epilogue::activate;
            mix(layer, within);
            const bool own = !layer.parallel || layer.mlp_norms.before.weight;
            const void *x = read_by(own ? layer.mlp_norms : layer.attention_norms);
            const Join join = join_behind(i);
            if (layer.experts != nullptr) {
                experts(layer, i, x, join);
                continue;
            }
            linear(product(layer.gate_up, x, call_.gated, epilogue), &layer.down);
            linear_and_join(product(layer.down, call_.gated, call_.added), join, next);
        }
        if (call_.ends != nullptr && call_.ends->count > 0) score(*call_.ends);
    }

  private:
    // What becomes of a block's output, row by row: it is normalised, multiplied, and added to what
    // the block beside it gave. Then come norms of the stream, the first of which adds it.
    struct Join {
        void *output;
        float scale = 1.0f;      // of the output
        void *branch = nullptr;  // what another mixer gives, which is added
        float branch_scale = 1.0f;
        NormCall after;
        float multiplier;
        const void *beside;  // or null
        NormCall norms[2];
        int count;

        bool empty() const {
            return scale == 1.0f && !branch && after.kind == NormKind::none && multiplier == 1.0f &&
                !beside && count == 0;
        }
    };

    // What the linears of a block read.
    const void *read_by(const StackBlock &block) const {
        return block.before.weight ? call_.normed : call_.residual;
    }

    // What attention adds.
    void *attended(const StackLayer &layer) const {
        return layer.parallel ? call_.attended : call_.added;
    }

    NormCall norm(const StackNorm &norm, const void *x, void *out, bool *finite = nullptr) const {
        return {
            .kind = norm.weight ? call_.norm : NormKind::none,
            .dtype = call_.dtype,
            .rows = call_.tokens,
            .size = call_.hidden,
            .x = x,
            .residual = nullptr,
            .weight = norm.weight,
            .bias = norm.bias,
            .eps = call_.eps,
            .total = nullptr,
            .out = out,
            .finite = finite,
        };
    }

    // A block's output becomes part of the stream, whose sum with it may be normalised.
    void add_to_stream(Join &join, const StackNorm &with, void *out, bool *finite) const {
        NormCall sum = norm(with, call_.added, out, finite);
        sum.residual = call_.residual;
        sum.total = with.weight ? call_.added : call_.residual;
        join.norms[join.count++] = sum;
    }

    // The stream is read through a norm, which takes the sum before it along.
    void read_stream(Join &join, const StackNorm &before, void *out, bool *finite = nullptr) const {
        if (before.weight == nullptr) return;
        NormCall reading = norm(before, call_.residual, out, finite);
        if (join.count > 0 && join.norms[join.count - 1].kind == NormKind::none) {
            const NormCall &sum = join.norms[--join.count];
            reading.x = sum.x;
            reading.residual = sum.residual;
            reading.total = sum.total;
        }
        join.norms[join.count++] = reading;
    }

    // What joins the output of a block, but for the norms of the stream.
    Join join_of(const StackLayer &layer, const StackBlock &block, void *output) const {
        return {
            .output = output,
            .after = norm(block.after, output, output),
            .multiplier = layer.multiplier,
            .beside = nullptr,
            .norms = {},
            .count = 0,
        };
    }

    // Between the blocks of a layer.
    Join join_within(const StackLayer &layer) const {
        Join join = join_of(layer, layer.attention_norms, attended(layer));
        const bool recurs = layer.recurrence.layer != nullptr;
        join.scale = (recurs ? layer.recurrence_scales : layer.attention_scales).out;
        if (recurs && layer.attends) {
            join.branch = call_.branch;
            join.branch_scale = layer.attention_scales.out;
        }
        if (!layer.parallel)
            add_to_stream(join, layer.attention_norms.with, call_.residual, nullptr);
        read_stream(join, layer.mlp_norms.before, call_.normed);
        return join;
    }

    // Behind layer `i`.
    Join join_behind(int64_t i) const {
        const StackLayer &layer = call_.layers[i];
        const bool last = i + 1 == call_.count;
        const bool result = last && call_.final_norm.weight == nullptr;
        Join join = join_of(layer, layer.mlp_norms, call_.added);
        join.scale = layer.mlp_scale;
        if (layer.parallel) join.beside = call_.attended;
        add_to_stream(
            join, layer.mlp_norms.with, result ? call_.out : call_.residual,
            result ? call_.finite : nullptr);
        if (last) read_stream(join, call_.final_norm, call_.out, call_.finite);
        else read_stream(join, call_.layers[i + 1].attention_norms.before, call_.normed);
        return join;
    }

    void join_rows(const Join &join, int64_t first, int64_t last) const {
        for (int64_t row = first; row < last; ++row) {
            if (join.scale != 1.0f) scale(row_of(join.output, row), join.scale);
            if (join.branch && join.branch_scale != 1.0f)
                scale(row_of(join.branch, row), join.branch_scale);
            if (join.branch) add_to(row_of(join.output, row), row_of(join.branch, row));
            if (join.after.kind != NormKind::none) norm_one(join.after, row);
            if (join.multiplier != 1.0f) scale(row_of(join.output, row), join.multiplier);
            if (join.beside) add_to(row_of(join.output, row), row_of(join.beside, row));
            for (int i = 0; i < join.count; ++i) norm_one(join.norms[i], row);
        }
    }

    void scale(void *row, float factor) const {
        if (call_.dtype == Dtype::bf16) scale_as<bf16>(row, factor);
        else scale_as<float>(row, factor);
    }

    template <class T> void scale_as(void *row, float factor) const {
        T *x = static_cast<T *>(row);
        scale_row(x, factor, call_.hidden, x);
    }

    // What a mixer reads.
    const void *multiplied(const void *x, float factor) {
        if (factor == 1.0f) return x;
        in_blocks(norm_block(), [&](int64_t first, int64_t last) {
            std::memcpy(
                row_of(call_.scaled, first), row_of(x, first), (last - first) * row_bytes());
            for (int64_t row = first; row < last; ++row) scale(row_of(call_.scaled, row), factor);
        });
        return call_.scaled;
    }

    void add_to(void *row, const void *other) const {
        if (call_.dtype == Dtype::bf16) add_as<bf16>(row, other);
        else add_as<float>(row, other);
    }

    template <class T> void add_as(void *row, const void *other) const {
        T *total = static_cast<T *>(row);
        add_rows(total, static_cast<const T *>(other), call_.hidden, total);
    }

    // Of many rows some that follow each other, so that those to come can be asked for.
    int64_t norm_block() const { return call_.tokens < 128 ? 2 : 8; }

    // Embed, if ids are given, and normalise for the first block.
    void enter() {
        const StackNorm &before = call_.layers[0].attention_norms.before;
        if (call_.ends == nullptr && before.weight == nullptr) return;
        const NormCall first_norm = norm(before, call_.residual, call_.normed);
        in_blocks(norm_block(), [&](int64_t first, int64_t last) {
            for (int64_t token = first; call_.ends != nullptr && token < last; ++token)
                embed(*call_.ends, token);
            for (int64_t token = first; token < last; ++token) norm_one(first_norm, token);
        });
    }

    void embed(const StackEnds &ends, int64_t token) const {
        const int64_t id = ends.ids[token];
        void *to = row_of(call_.residual, token);
        if (ends.embedding == nullptr) std::memcpy(to, row_of(ends.table, id), row_bytes());
        else if (call_.dtype == Dtype::bf16)
            linear_row(*ends.embedding, id, static_cast<bf16 *>(to));
        else linear_row(*ends.embedding, id, static_cast<float *>(to));
        if (ends.scale != 1.0f) scale(to, ends.scale);
        if (ends.learned_positions)
            add_to(to, row_of(ends.learned_positions, call_.positions[token]));
    }

    // The stream as it enters a layer becomes the `aux`-th of a token's auxiliary hidden states.
    void copy_stream(int64_t aux) {
        in_blocks(norm_block(), [&](int64_t first, int64_t last) {
            for (int64_t token = first; token < last; ++token)
                std::memcpy(
                    row_of(call_.aux, token * call_.aux_count + aux), row_of(call_.residual, token),
                    row_bytes());
        });
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
        const LinearCall call(
            *ends.head, x, ends.count, ends.logits, Epilogue::widen, team_.threads());
        linear(call, nullptr);
        const int64_t parts = scan_parts(ends.head->outputs);
        team_.run(
            ends.count * parts,
            [&](int64_t i) {
                const int64_t size = ends.head->outputs, begin = i % parts * SCAN_PART;
                const int64_t left = size - begin, count = left < SCAN_PART ? left : SCAN_PART;
                float *logits = ends.logits + i / parts * size;
                if (ends.logits_scale != 1.0f)
                    scale_row(logits + begin, ends.logits_scale, count, logits + begin);
                if (ends.softcap != 0.0f) cap_row(logits + begin, ends.softcap, count);
                ends.parts[i] = scan_part(logits, begin, count);
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
        return {linear, x, call_.tokens, y, epilogue, team_.threads()};
    }

    // A chunk, while the memory is asked for the next, or for the first of the `next` linear.
    void chunk(LinearCall &call, int64_t i, const PackedLinear *next) const {
        call.chunk(i, call.prefetch(i, next));
    }

    void linear(LinearCall call, const PackedLinear *next) {
        team_.run(call.chunks(), [&](int64_t i) { chunk(call, i, next); });
    }

    void linear_and_join(LinearCall call, const Join &join, const PackedLinear *next) {
        if (join.empty()) {
            linear(call, next);
        } else if (call_.tokens > ROWS_IN_PASSING) {
            linear(call, next);
            in_blocks(
                norm_block(), [&](int64_t first, int64_t last) { join_rows(join, first, last); });
        } else {
            team_.run(
                call.chunks(), [&](int64_t i) { chunk(call, i, next); },
                [&] { join_rows(join, 0, call_.tokens); });
        }
    }

    // The experts of layer `i`, which read x, and what joins their output.
    void experts(const StackLayer &layer, int64_t i, const void *x, const Join &join) {
        if (call_.dtype == Dtype::bf16) experts_as<bf16>(layer, i, x, join);
        else experts_as<float>(layer, i, x, join);
    }

    template <class T>
    void experts_as(const StackLayer &layer, int64_t i, const void *x, const Join &join) {
        const ExpertsCall call = {
            .experts = layer.experts,
            .tokens = call_.tokens,
            .x = x,
            .out = call_.added,
            .room = call_.experts_rooms[i],
            .plan = call_.experts_plans + i,
        };
        ExpertsRun<T> run(call, team_);
        const auto sum_and_join = [&](int64_t first, int64_t last) {
            for (int64_t token = first; token < last; ++token) run.sum_token(token);
            join_rows(join, first, last);
        };
        if (call_.tokens <= ROWS_IN_PASSING) {
            run.run([&] { sum_and_join(0, call_.tokens); });
        } else {
            run.run();
            in_blocks(norm_block(), sum_and_join);
        }
    }

    static const PackedLinear &first_linear(const StackLayer &layer) {
        if (layer.latent.heads > 0)
            return layer.latent.query_down.inputs > 0 ? layer.latent.query_down
                                                      : layer.latent.query;
        return layer.attends ? layer.qkv : layer.recurrence.in;
    }

    // The mixers of a layer, and what joins their output; then comes the linear `next`.
    void mix(const StackLayer &layer, const PackedLinear *next) {
        const void *x = read_by(layer.attention_norms);
        if (layer.latent.heads > 0) {
            latent_attention(layer, x);
            linear_and_join(
                product(layer.out, call_.values, attended(layer)), join_within(layer), next);
            return;
        }
        const StackRecurrence &recurrence = layer.recurrence;
        const bool recurs = recurrence.layer != nullptr;
        if (layer.attends) {
            const void *from = multiplied(x, layer.attention_scales.in);
            linear(product(layer.qkv, from, call_.heads), &layer.out);
            attention(layer);
            if (layer.gated) gate_heads(layer);
            if (recurs) linear(product(layer.out, call_.mixed, call_.branch), &recurrence.in);
        }
        if (recurs) {
            const void *from = multiplied(x, layer.recurrence_scales.in);
            linear(product(recurrence.in, from, call_.projected), &recurrence.out);
            recur(recurrence);
        }
        const PackedLinear &out = recurs ? recurrence.out : layer.out;
        linear_and_join(product(out, call_.mixed, attended(layer)), join_within(layer), next);
    }

    void latent_attention(const StackLayer &layer, const void *x) {
        if (call_.dtype == Dtype::bf16) latent_attention_as<bf16>(layer, x);
        else latent_attention_as<float>(layer, x);
    }

    template <class T> void latent_attention_as(const StackLayer &layer, const void *x) {
        const StackLatent &latent = layer.latent;
        const StackGroup &group = call_.groups[layer.group];
        const StackRotary &rotary = call_.rotaries[layer.rotary];
        const int64_t heads = latent.heads, size = latent.head_size();
        const int64_t own = latent.content + latent.position;
        const void *queries_of = x;
        if (latent.query_down.inputs > 0) {
            linear(product(latent.query_down, x, call_.query_latents), &latent.query);
            NormCall norm = part_norm(latent.query_norm, latent.query_eps);
            norm.size = latent.query.inputs;
            norm.x = norm.out = call_.query_latents;
            in_blocks(norm_block(), [&](int64_t first, int64_t last) {
                for (int64_t token = first; token < last; ++token) norm_one(norm, token);
            });
            queries_of = call_.query_latents;
        }
        linear(product(latent.query, queries_of, call_.heads), &latent.down);
        linear(product(latent.down, x, call_.latents), nullptr);
        const HeadLinearsCall absorb = {
            .linears = latent.absorb,
            .heads = heads,
            .rows = call_.tokens,
            .x = call_.heads,
            .x_stride = heads * own,
            .x_head_stride = own,
            .y = call_.absorbed,
            .y_stride = heads * size,
            .y_head_stride = size,
        };
        const auto turn = [&](const T *from, int64_t token, T *to) {
            const int64_t at = call_.positions[token] * latent.position;
            const T *cos = static_cast<const T *>(rotary.cos) + at;
            const T *sin = static_cast<const T *>(rotary.sin) + at;
            if (latent.interleaved) split_pairs(from, latent.position, to);
            rotate(latent.interleaved ? to : from, cos, sin, latent.position, to);
        };
        const int64_t chunks = head_chunks(absorb);
        team_.run(call_.tokens + chunks, [&](int64_t i) {
            if (i >= call_.tokens) return head_chunk(absorb, i - call_.tokens);
            keep_latent<T>(layer, i, turn);
            const T *from = static_cast<const T *>(call_.heads) + i * heads * own;
            T *to = static_cast<T *>(call_.absorbed) + i * heads * size;
            for (int64_t head = 0; head < heads; ++head)
                turn(from + head * own + latent.content, i, to + head * size + latent.latent);
        });
        const AttentionCall attention = {
            .shape = group.shape,
            .rows = group.rows,
            .cache = layer.cache,
            .scale = layer.scale,
            .q = call_.absorbed,
            .q_stride = heads * size,
            .out = call_.mixed,
            .partials = group.partials,
        };
        attend_all(attention, group);
        const HeadLinearsCall restore = {
            .linears = latent.restore,
            .heads = heads,
            .rows = call_.tokens,
            .x = call_.mixed,
            .x_stride = heads * size,
            .x_head_stride = size,
            .y = call_.values,
            .y_stride = heads * latent.value,
            .y_head_stride = latent.value,
        };
        team_.run(head_chunks(restore), [&](int64_t i) { head_chunk(restore, i); });
    }

    // A norm of latents, of the model's kind.
    NormCall part_norm(const void *weight, float eps) const {
        NormCall part = norm({weight, nullptr}, nullptr, nullptr);
        part.eps = eps;
        return part;
    }

    // A token's latent is normalised, and its key rotated; both are kept.
    template <class T, class Turn>
    void keep_latent(const StackLayer &layer, int64_t token, const Turn &turn) const {
        static thread_local Scratch scratch;
        const StackLatent &latent = layer.latent;
        const StackGroup &group = call_.groups[layer.group];
        const int64_t size = latent.head_size();
        T *key = static_cast<T *>(scratch.reserve(2 * size * sizeof(T)));
        const T *from = static_cast<const T *>(call_.latents) + token * size;
        NormCall norm = part_norm(latent.norm, latent.eps);
        norm.size = latent.latent;
        norm.x = from;
        norm.out = key;
        norm_one(norm, 0);
        turn(from + latent.latent, token, key + latent.latent);
        const int64_t place = group.places[token];
        switch (group.shape.format) {
            case CacheFormat::model:
                return store_latent<T, T>(group.shape, layer.cache, place, key, key + size);
            case CacheFormat::e4m3:
                return store_latent<T, E4m3>(group.shape, layer.cache, place, key, key + size);
            case CacheFormat::e5m2:
                return store_latent<T, E5m2>(group.shape, layer.cache, place, key, key + size);
        }
    }

    // Tasks and merges of a group whose queries are ready.
    void attend_all(const AttentionCall &attention, const StackGroup &group) {
        team_.run(group.count, [&](int64_t i) {
            attention_task(attention, group.tasks, group.count, i, team_.threads());
        });
        team_.run(
            group.merge_count, [&](int64_t i) { attention_merge(attention, group.merges[i]); });
    }

    void recur(const StackRecurrence &recurrence) {
        const RecurrenceCall call = {
            .layer = recurrence.layer,
            .tokens = call_.tokens,
            .rows = call_.states[recurrence.group],
            .projected = call_.projected,
            .conv_states = recurrence.conv_states,
            .states = recurrence.states,
            .room = RecurrenceRoom::at(call_.recurrence_room, *recurrence.layer, call_.tokens),
            .out = call_.mixed,
        };
        recurrence_phases(call, team_);
    }

    void gate_heads(const StackLayer &layer) {
        if (call_.dtype == Dtype::bf16) gate_heads_as<bf16>(layer);
        else gate_heads_as<float>(layer);
    }

    template <class T> void gate_heads_as(const StackLayer &layer) {
        const int64_t size = layer.out.inputs, stride = layer.qkv.outputs;
        in_blocks(norm_block(), [&](int64_t first, int64_t last) {
            for (int64_t token = first; token < last; ++token) {
                T *x = static_cast<T *>(call_.mixed) + token * size;
                const T *end = static_cast<const T *>(call_.heads) + (token + 1) * stride;
                sigmoid_mul_row(x, end - size, size, x);
            }
        });
    }

    void attention(const StackLayer &layer) {
        const StackGroup &group = call_.groups[layer.group];
        const StackRotary &rotary = call_.rotaries[layer.rotary];
        const LayerCache cache = layer.cache.keys
            ? layer.cache
            : KvLayout(group.shape).laid_out(call_.pass_cache, group.shape.heads);
        const int64_t stride = layer.qkv.outputs;
        const QkNormRopeCall heads = {
            .shape = group.shape,
            .cache = cache,
            .places = group.places,
            .heads = call_.heads,
            .heads_stride = stride,
            .cos = rotary.cos,
            .sin = rotary.sin,
            .rotated = rotary.rotated,
            .positions = call_.positions,
            .query_scale = rotary.query_scale,
            .norms = layer.head_norms,
            .q = call_.heads,
            .q_stride = stride,
        };
        const AttentionCall attention = {
            .shape = group.shape,
            .rows = group.rows,
            .cache = cache,
            .scale = layer.scale,
            .q = call_.heads,
            .q_stride = stride,
            .out = call_.mixed,
            .partials = group.partials,
            .softcap = layer.softcap,
            .sinks = layer.sinks,
        };
        // A query that one task reads alone is readied there.
        const bool in_passing =
            group.one_each && group.merge_count == 0 && !layer.head_norms.over_token;
        if (!in_passing)
            in_blocks(call_.tokens < 16 * LANES ? 8 : 4 * LANES, [&](int64_t first, int64_t last) {
                qk_norm_rope_store_tokens(heads, first, last);
            });
        team_.run(group.count, [&](int64_t i) {
            const AttentionTask &task = group.tasks[i];
            if (in_passing) qk_norm_rope_store_token(heads, task.token, task.head, task.heads);
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
