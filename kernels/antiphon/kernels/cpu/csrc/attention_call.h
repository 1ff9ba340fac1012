// The tasks of a call of attention, and what joins them.

#pragma once

#include "attention.h"
#include "team.h"

namespace ISA_NS {

// Compute one of a call's tasks; they may be computed in any order, by any thread, of which there
// are so many.
static void attention_task(
    const AttentionCall &call, const AttentionTask *tasks, int64_t count, int64_t i, int threads) {
    const AttentionTask *following = i + threads < count ? tasks + i + threads : nullptr;
    if (call.shape.dtype == Dtype::bf16) attend<bf16>(call, tasks[i], following);
    else attend<float>(call, tasks[i], following);
}

// Once all tasks are computed.
static void attention_merge(const AttentionCall &call, const AttentionMerge &one) {
    if (call.shape.dtype == Dtype::bf16) merge<bf16>(call, one);
    else merge<float>(call, one);
}

// All tasks of a call, with a team of its own.
static void attention_call(
    const AttentionCall &call, const AttentionTask *tasks, int64_t count,
    const AttentionMerge *merges, int64_t merge_count, int threads) {
    Phase phases[2] = {};
    in_team(threads, phases, [&](TeamThread &team) {
        team.run(count, [&](int64_t i) { attention_task(call, tasks, count, i, team.threads()); });
        team.run(merge_count, [&](int64_t i) { attention_merge(call, merges[i]); });
    });
}

}  // namespace ISA_NS
