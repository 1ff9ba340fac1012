// A mixture of experts: routing, the linears of all chosen experts, and their weighted sum.
//
// Rows, pairs of a token and one of its choices, are sorted by expert, so that each expert's panels
// are read once by all of its rows; experts that no token chose are not read. Every linear is cut into
// chunks of like work (chunks.h), and threads take those of all experts from one ticket. What a row
// comes to depends on that row alone: a linear sums in one order, and a token's experts are summed
// in the order of its choices.

#pragma once

#include "chunks.h"
#include "elementwise.h"
#include "packed_experts.h"
#include "scan.h"
#include "simd.h"
#include "team.h"
#include "vectors.h"

namespace ISA_NS {

// Of one call: the router, choices, gate and up, down, the sums.
static constexpr int64_t EXPERTS_PHASES = 5;

// So many tokens are routed by the thread that finishes their logits; more are shared out.
static constexpr int64_t ROUTED_IN_PASSING = 16;

// Tokens that a thread routes or sums at once.
static constexpr int64_t TOKENS_TOGETHER = 8;

// Cut a job so that a chunk is about `target` of what `work_of` counts: its rows stay in the
// second-level cache beside a panel, and are so many that most experts are read once.
static void cut_job(ExpertJob &job, int64_t target) {
    constexpr int64_t BLOCK_BYTES = 384 << 10;
    const PackedLinear &linear = *job.linear;
    const TileSizes sizes = tile_sizes_of(linear);
    const int64_t row_bytes = linear.inputs * (linear.dtype == Dtype::bf16 ? 2 : 4);
    const int64_t fitting = BLOCK_BYTES / row_bytes / sizes.tile_rows * sizes.tile_rows;
    const int64_t most = fitting < sizes.block_rows ? sizes.block_rows
        : fitting > 256                             ? 256 / sizes.tile_rows * sizes.tile_rows
                                                    : fitting;
    job.blocks = ceil_div(job.rows, most);
    job.block_rows = ceil_div(job.rows, job.blocks);
    if (job.blocks > 1)
        job.block_rows = ceil_div(job.block_rows, sizes.tile_rows) * sizes.tile_rows;
    job.blocks = ceil_div(job.rows, job.block_rows);
    const int64_t panels = panels_of(linear);
    const int64_t each = panel_bytes(linear) * ceil_div(job.block_rows, sizes.free_rows);
    const int64_t wanted = target / each;
    job.groups = ceil_div(panels, wanted < 1 ? 1 : wanted);
    job.panels = ceil_div(panels, job.groups);
    job.groups = ceil_div(panels, job.panels);
}

// Bytes that are read, or as many as take as long as what is multiplied with them.
static int64_t work_of(const ExpertJob &job) {
    const int64_t times = ceil_div(job.rows, tile_sizes_of(*job.linear).free_rows);
    return panels_of(*job.linear) * panel_bytes(*job.linear) * times;
}

static void cut_jobs(ExpertJobs &phase) {
    constexpr int64_t CHUNKS = 64, CHUNK_BYTES = 48 << 10;
    int64_t work = 0;
    for (int64_t i = 0; i < phase.count; ++i) work += work_of(phase.jobs[i]);
    const int64_t target = work / CHUNKS < CHUNK_BYTES ? CHUNK_BYTES : work / CHUNKS;
    phase.chunks = 0;
    for (ExpertJob *job = phase.jobs; job < phase.jobs + phase.count; ++job) {
        cut_job(*job, target);
        job->first_chunk = phase.chunks;
        phase.chunks += job->blocks * job->groups;
    }
}

INLINE const ExpertJob &job_of(const ExpertJobs &phase, int64_t chunk) {
    int64_t low = 0, high = phase.count;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (phase.jobs[middle].first_chunk <= chunk) low = middle;
        else high = middle;
    }
    return phase.jobs[low];
}

// A chunk of a job: rows [row, row + rows) of it by panels [panel, last).
struct ExpertChunk {
    int64_t row, rows, panel, last;

    // Chunks of one group of panels follow each other: its panels stay in a cache that threads share.
    ExpertChunk(const ExpertJob &job, int64_t chunk) {
        const int64_t i = chunk - job.first_chunk;
        const int64_t panels = panels_of(*job.linear);
        row = i % job.blocks * job.block_rows;
        rows = job.rows - row < job.block_rows ? job.rows - row : job.block_rows;
        panel = i / job.blocks * job.panels;
        last = panel + job.panels < panels ? panel + job.panels : panels;
    }
};

// The weights that the thread of a chunk, one of so many, most likely reads after it.
INLINE PrefetchRange
prefetch_of(const ExpertJobs &phase, const ExpertJob &job, int64_t chunk, int threads) {
    const int64_t later = chunk + threads;
    if (later >= phase.chunks) return {};
    const ExpertJob &following = job_of(phase, later);
    const ExpertChunk now(job, chunk), then(following, later);
    if (&following == &job && then.panel == now.panel) return {};
    const PackedLinear &linear = *following.linear;
    return {panel_at(linear, then.panel), (then.last - then.panel) * panel_bytes(linear)};
}

// activation(gate) * up of some columns, with the roundings of separate operations on T.
template <class T>
INLINE void gate_columns(
    const PackedExperts &experts, const T *gate, const T *up, int64_t count, T *out) {
    by_vectors(count, [&](int64_t i, auto part) {
        F32 a = load_part(gate + i, part), b = load_part(up + i, part);
        if (experts.activation == Activation::clamped_swish) {
            const F32 one = splat(1.0f), limit = splat(experts.limit);
            a = min(limit, a);
            b = min(limit, max(splat(-experts.limit), b));
            const F32 power = exponential(mul(splat(-experts.alpha), a));
            const F32 swish = mul(a, div(one, add(one, power)));
            store_part(out + i, mul(swish, add(b, one)), part);
        } else {
            const F32 opened =
                by_activation(experts.activation, [&](auto kind) { return activated<kind()>(a); });
            store_part(out + i, mul(rounded<T>(opened), b), part);
        }
    });
}

// Take the experts of all but the best groups out of a ranking.
static void keep_best_groups(const Routing &routing, int64_t count, float *ranking) {
    static thread_local Scratch scratch;
    constexpr float LEAST = -__builtin_inff();
    const int64_t size = count / routing.groups;
    float *worth = static_cast<float *>(scratch.reserve((routing.groups + size) * sizeof(float)));
    float *left = worth + routing.groups;
    for (int64_t group = 0; group < routing.groups; ++group) {
        std::memcpy(left, ranking + group * size, size * sizeof(float));
        worth[group] = 0.0f;
        for (int64_t i = 0; i < routing.group_best; ++i) {
            const int64_t best = argmax_row(left, size);
            worth[group] += left[best];
            left[best] = LEAST;
        }
    }
    for (int64_t left_out = routing.groups_kept; left_out < routing.groups; ++left_out) {
        int64_t worst = -1;
        for (int64_t group = 0; group < routing.groups; ++group)
            if (worth[group] < __builtin_inff() && (worst < 0 || worth[group] <= worth[worst]))
                worst = group;
        if (worst < 0) return;
        worth[worst] = __builtin_inff();
        for (int64_t i = 0; i < size; ++i) ranking[worst * size + i] = LEAST;
    }
}

// Choose the experts of a token whose logits are there, and their shares.
static void choose_experts(const ExpertsCall &call, int64_t token) {
    static thread_local Scratch scratch;
    const PackedExperts &experts = *call.experts;
    const Routing &routing = experts.routing;
    const int64_t count = experts.count;
    float *ranking = static_cast<float *>(scratch.reserve(2 * count * sizeof(float)));
    float *scores = ranking + count;
    const float *logits = call.room.logits + token * count;

    if (routing.sigmoid) {
        by_vectors(count, [&](int64_t i, auto part) {
            const F32 power = exponential(sub(zeros(), load_part(logits + i, part)));
            store_part(scores + i, div(splat(1.0f), add(splat(1.0f), power)), part);
        });
    } else {
        const F32 top = splat(logits[argmax_row(logits, count)]);
        F32 sums = zeros();
        by_vectors(count, [&](int64_t i, auto part) {
            const F32 power = exponential(sub(load_part(logits + i, part), top));
            store_part(scores + i, power, part);
            sums = add(sums, load_part(scores + i, part));  // lanes beyond the row are zero
        });
        const F32 total = splat(sum(sums));
        by_vectors(count, [&](int64_t i, auto part) {
            store_part(scores + i, div(load_part(scores + i, part), total), part);
        });
    }

    // Logits are ordered like their scores, but without ties between scores that round to one.
    const bool plain = experts.correction == nullptr && routing.groups == 1;
    by_vectors(count, [&](int64_t i, auto part) {
        F32 worth = load_part((plain ? logits : scores) + i, part);
        if (experts.correction != nullptr)
            worth = add(worth, load_part(experts.correction + i, part));
        store_part(ranking + i, worth, part);
    });
    constexpr float LEAST = -__builtin_inff();
    if (routing.groups > 1) keep_best_groups(routing, count, ranking);

    int32_t *chosen = call.room.chosen + token * routing.top_k;
    float *shares = call.room.shares + token * routing.top_k;
    float total = 0.0f;
    for (int64_t i = 0; i < routing.top_k; ++i) {
        // Of a token that is not finite some expert is chosen twice, and its output is not finite.
        const int64_t best = argmax_row(ranking, count);
        ranking[best] = LEAST;
        chosen[i] = static_cast<int32_t>(best);
        shares[i] = scores[best];
        total += scores[best];
    }
    const float sum_of_shares = total + 1e-20f;  // all of them may round to zero
    for (int64_t i = 0; i < routing.top_k; ++i) {
        if (routing.renormalised) shares[i] /= sum_of_shares;
        shares[i] *= routing.factor;
    }
}

// Sort the rows by expert, in the order of their tokens, and cut the work of what follows.
static void sort_by_expert(const ExpertsCall &call) {
    const PackedExperts &experts = *call.experts;
    const ExpertsRoom &room = call.room;
    const int64_t count = experts.count, pairs = call.tokens * experts.routing.top_k;
    int32_t *ends = room.bounds + 1;  // while rows are placed, where the next one goes
    std::memset(room.bounds, 0, (count + 1) * sizeof(int32_t));
    for (int64_t pair = 0; pair < pairs; ++pair) ++ends[room.chosen[pair]];
    int32_t total = 0;
    for (int64_t expert = 0; expert < count; ++expert) total += std::exchange(ends[expert], total);
    for (int64_t pair = 0; pair < pairs; ++pair) {
        const int32_t row = ends[room.chosen[pair]]++;
        room.row_of_pair[pair] = row;
        room.pair_of_row[row] = static_cast<int32_t>(pair);
    }

    ExpertJobs &first = call.plan->phases[0], &second = call.plan->phases[1];
    first = {.jobs = room.jobs, .count = 0, .chunks = 0};
    second = {.jobs = room.jobs + count + 2, .count = 0, .chunks = 0};
    const auto add_job = [](ExpertJobs &phase, const PackedLinear &linear, const void *x, void *y,
                            Epilogue epilogue, int64_t row, int64_t rows) {
        phase.jobs[phase.count++] = {
            .linear = &linear,
            .x = x,
            .y = y,
            .epilogue = epilogue,
            .row = row,
            .rows = rows,
        };
    };
    for (int64_t expert = 0; expert < experts.held; ++expert) {
        const int32_t *bounds = room.bounds + experts.first + expert;
        const int64_t row = bounds[0], rows = bounds[1] - row;
        if (rows == 0) continue;
        const PackedExpert &each = experts.experts[expert];
        const bool silu = experts.activation == Activation::silu;
        add_job(
            first, each.gate_up, nullptr, room.gated, silu ? Epilogue::gate : Epilogue::store, row,
            rows);
        add_job(second, each.down, room.gated, room.made, Epilogue::store, row, rows);
    }
    if (experts.shared != nullptr) {
        const PackedExpert &each = *experts.shared;
        add_job(first, each.gate_up, call.x, room.shared_gated, Epilogue::gate, 0, call.tokens);
        add_job(
            second, each.down, room.shared_gated, room.shared_made, Epilogue::store, 0,
            call.tokens);
    }
    if (experts.shared_gate != nullptr)
        add_job(
            first, *experts.shared_gate, call.x, room.shared_scale, Epilogue::store, 0,
            call.tokens);
    cut_jobs(first);
    cut_jobs(second);
}

// A call as one thread sees it.
template <class T> class ExpertsRun {
  public:
    ExpertsRun(const ExpertsCall &call, TeamThread &team)
        : call_(call), experts_(*call.experts), team_(team) {}

    // All but the sums; `after` is called by the thread that finishes last.
    template <class After> void run(After &&after) {
        route();
        const ExpertJobs &first = call_.plan->phases[0], &second = call_.plan->phases[1];
        team_.run(first.chunks, [&](int64_t chunk) { compute(first, chunk); });
        team_.run(second.chunks, [&](int64_t chunk) { compute(second, chunk); }, after);
    }
    void run() {
        run([] {});
    }

    // The weighted sum of what a token's experts made, and what the shared one did.
    void sum_token(int64_t token) const {
        const ExpertsRoom &room = call_.room;
        const int64_t size = experts_.hidden, top_k = experts_.routing.top_k;
        const int32_t *rows = room.row_of_pair + token * top_k;
        const int32_t *chosen = room.chosen + token * top_k;
        const float *shares = room.shares + token * top_k;
        const T *made = static_cast<const T *>(room.made);
        const T *shared = nullptr;
        if (experts_.shared != nullptr)
            shared = static_cast<const T *>(room.shared_made) + token * size;
        const F32 scale = shared_scale(token);
        T *out = static_cast<T *>(call_.out) + token * size;
        by_vectors(size, [&](int64_t i, auto part) {
            F32 total = zeros();
            for (int64_t k = 0; k < top_k; ++k) {
                if (!is_held(chosen[k])) continue;
                const F32 one = load_part(made + rows[k] * size + i, part);
                total = add(total, experts_.share_on_input ? one : mul(one, splat(shares[k])));
            }
            if (shared != nullptr) {
                F32 beside = load_part(shared + i, part);
                if (experts_.shared_gate != nullptr) beside = rounded<T>(mul(beside, scale));
                total = add(rounded<T>(total), beside);
            }
            store_part(out + i, total, part);
        });
    }

  private:
    bool is_held(int64_t expert) const {
        return expert >= experts_.first && expert < experts_.first + experts_.held;
    }

    void route() {
        const int64_t tokens = call_.tokens;
        ExpertJob job = {
            .linear = &experts_.router,
            .x = call_.x,
            .y = call_.room.logits,
            .epilogue = Epilogue::store,
            .row = 0,
            .rows = tokens,
        };
        ExpertJobs phase = {.jobs = &job, .count = 1, .chunks = 0};
        cut_jobs(phase);
        const bool in_passing = tokens <= ROUTED_IN_PASSING;
        team_.run(
            phase.chunks,
            [&](int64_t chunk) {
                const ExpertChunk part(job, chunk);
                const float *x = widened(part.row, part.rows);
                linear_block(
                    *job.linear, part.panel, part.last, x, part.row, part.rows, job.y, job.epilogue,
                    PrefetchRange());
            },
            [&] {
                if (!in_passing) return;
                for (int64_t token = 0; token < tokens; ++token) choose_experts(call_, token);
                sort_by_expert(call_);
            });
        if (in_passing) return;
        team_.run(
            ceil_div(tokens, TOKENS_TOGETHER),
            [&](int64_t chunk) {
                const int64_t first = chunk * TOKENS_TOGETHER, end = first + TOKENS_TOGETHER;
                for (int64_t token = first; token < end && token < tokens; ++token)
                    choose_experts(call_, token);
            },
            [&] { sort_by_expert(call_); });
    }

    // Tokens in float32.
    const float *widened(int64_t first, int64_t count) const {
        static thread_local Scratch scratch;
        const int64_t size = experts_.hidden;
        const T *x = static_cast<const T *>(call_.x) + first * size;
        if constexpr (std::is_same_v<T, float>) return x;
        float *wide = static_cast<float *>(scratch.reserve(count * size * sizeof(float)));
        by_vectors(count * size, [&](int64_t i, auto part) {
            store_part(wide + i, load_part(x + i, part), part);
        });
        return wide;
    }

    void compute(const ExpertJobs &phase, int64_t chunk) const {
        const ExpertJob &job = job_of(phase, chunk);
        const ExpertChunk part(job, chunk);
        const PrefetchRange prefetch = prefetch_of(phase, job, chunk, team_.threads());
        const int64_t first = job.row + part.row;
        const T *x = static_cast<const T *>(job.x) + first * job.linear->inputs;
        if (job.x == nullptr) x = gathered(first, part.rows);
        if (job.x != nullptr || experts_.activation == Activation::silu) {
            linear_block(
                *job.linear, part.panel, part.last, x, first, part.rows, job.y, job.epilogue,
                prefetch);
            return;
        }
        // Gate and up stay with this thread.
        static thread_local Scratch scratch;
        const int64_t width = experts_.width;
        T *both = static_cast<T *>(scratch.reserve(part.rows * 2 * width * sizeof(T)));
        linear_block(
            *job.linear, part.panel, part.last, x, 0, part.rows, both, job.epilogue, prefetch);
        const int64_t at = part.panel * LANES, end = part.last * LANES;
        const int64_t count = (end < width ? end : width) - at;
        T *out = static_cast<T *>(job.y) + first * width + at;
        for (int64_t row = 0; row < part.rows; ++row, both += 2 * width, out += width)
            gate_columns(experts_, both + at, both + width + at, count, out);
    }

    // The tokens of rows [first, first + count) side by side.
    const T *gathered(int64_t first, int64_t count) const {
        static thread_local Scratch scratch;
        const int64_t size = experts_.hidden, top_k = experts_.routing.top_k;
        const int32_t *pairs = call_.room.pair_of_row + first;
        const T *x = static_cast<const T *>(call_.x);
        if (count == 1 && !experts_.share_on_input) return x + pairs[0] / top_k * size;
        T *rows = static_cast<T *>(scratch.reserve(count * size * sizeof(T)));
        for (int64_t row = 0; row < count; ++row) {
            const T *from = x + pairs[row] / top_k * size;
            T *to = rows + row * size;
            if (!experts_.share_on_input) {
                std::memcpy(to, from, size * sizeof(T));
                continue;
            }
            const F32 share = splat(call_.room.shares[pairs[row]]);
            by_vectors(size, [&](int64_t i, auto part) {
                store_part(to + i, mul(load_part(from + i, part), share), part);
            });
        }
        return rows;
    }

    // sigmoid(the shared expert's gate), with the roundings of separate operations on T.
    F32 shared_scale(int64_t token) const {
        if (experts_.shared_gate == nullptr) return splat(1.0f);
        const T *gate = static_cast<const T *>(call_.room.shared_scale) + token;
        const F32 power = rounded<T>(exponential(sub(zeros(), splat(lane_0(load(gate, 1))))));
        const F32 one = splat(1.0f);
        return rounded<T>(div(one, rounded<T>(add(one, power))));
    }

    const ExpertsCall &call_;
    const PackedExperts &experts_;
    TeamThread &team_;
};

template <class T> static void experts_call_as(const ExpertsCall &call, int threads) {
    Phase phases[EXPERTS_PHASES] = {};
    in_team(threads, phases, [&](TeamThread &team) {
        const int64_t tokens = call.tokens;
        ExpertsRun<T> run(call, team);
        run.run();
        team.run(ceil_div(tokens, TOKENS_TOGETHER), [&](int64_t chunk) {
            const int64_t first = chunk * TOKENS_TOGETHER, end = first + TOKENS_TOGETHER;
            for (int64_t token = first; token < end && token < tokens; ++token)
                run.sum_token(token);
        });
    });
}

// A whole call, with a team of its own.
static void experts_call(const ExpertsCall &call, int threads) {
    if (call.experts->dtype == Dtype::bf16) experts_call_as<bf16>(call, threads);
    else experts_call_as<float>(call, threads);
}

}  // namespace ISA_NS
