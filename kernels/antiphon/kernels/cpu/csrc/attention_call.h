// Which way a task of attention is computed, and the tasks of a call.

#pragma once

#include "amx_small_m.h"
#include "attention.h"
#include "team.h"

namespace ISA_NS {

// Compute one of a call's tasks; they may be computed in any order, by any thread, of which there
// are so many.
static void attention_task(
    const AttentionCall &call, const AttentionTask *tasks, int64_t count, int64_t i, int threads) {
    // Most likely this thread's next one, whose keys it asks the memory for at the end of this.
    const AttentionTask *following = i + threads < count ? tasks + i + threads : nullptr;
    if (call.shape.dtype != Dtype::bf16) attend<float>(call, tasks[i], following);
    else if (is_small_m(call, tasks[i])) attend_small_m(call, tasks[i], following);
    else attend<bf16>(call, tasks[i], following);
}

// All tasks of a call, with a team of its own.
static void attention_call(
    const AttentionCall &call, const AttentionTask *tasks, int64_t count, int threads) {
    Phase phase = {};
    in_team(threads, &phase, [&](TeamThread &team) {
        team.run(count, [&](int64_t i) { attention_task(call, tasks, count, i, team.threads()); });
    });
}

}  // namespace ISA_NS
