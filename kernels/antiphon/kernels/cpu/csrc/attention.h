// A task of attention: its queries go through the blocks of their keys (attention_block.h).

#pragma once

#include "amx.h"
#include "amx_attention.h"
#include "attention_block.h"
#include "kv_block.h"
#include "layout.h"
#include "simd.h"
#include "team.h"

namespace ISA_NS {

template <class T, class K, int R = TILE_QUERIES>
INLINE void attend_tile_of(
    int64_t queries, const AttentionCall &call, const AttentionTask &task, int64_t first,
    const KeyBlock &block, AttentionScratch<T> &room) {
    if constexpr (R > 1) {
        if (queries < R)
            return attend_tile_of<T, K, R - 1>(queries, call, task, first, block, room);
    }
    attend_tile<T, K, R>(call, task, first, block, room);
}

// Queries `first` to `last` - 1 of the task's attend to a block; K is what the cache is kept as.
template <class T, class K>
static void attend_in_tiles(
    const AttentionCall &call, const AttentionTask &task, int64_t first, int64_t last,
    const KeyBlock &block, AttentionScratch<T> &room) {
    if constexpr (IN_BYTES<K>)
        if (!TILES_WIDEN<T> || !room.widen)
            return attend_in_tiles<T, T>(call, task, first, last, block, room);
    const int64_t tiles = ceil_div(last - first, TILE_QUERIES);
    for (int64_t i = 0; i < tiles; ++i) {
        // Tiles of like height: 7 queries are 4 and 3.
        const int64_t height = ceil_div(last - first, tiles - i);
        attend_tile_of<T, TileWords<T, K>>(height, call, task, first, block, room);
        first += height;
    }
}

// What multiplies the sums of a query whose maximum and weight these are: the value's scale, divided
// by the weight, in which a sink has its part.
template <class T>
INLINE float output_scale(const AttentionCall &call, float top, float mass, int64_t query_head) {
    if (call.sinks == nullptr) return call.cache.value_scale / mass;
    const float sink = lane_0(load(static_cast<const T *>(call.sinks) + query_head, 1)) * LOG2_E;
    const float most = sink > top ? sink : top;
    const float rescale = lane_0(power_of_two(splat(top - most)));
    const float added = lane_0(power_of_two(splat(sink - most)));
    return call.cache.value_scale * rescale / (mass * rescale + added);
}

// The weighted sums of queries of a kv head divided by their weights, as rows of the result; the
// first is of this token.
template <class T>
static void write_out(
    const AttentionCall &call, int64_t token, int64_t head, const AttentionSums &sums,
    int64_t queries, int64_t width) {
    const int64_t group = call.shape.queries_per_head, size = call.shape.head_size;
    const float *values = sums.values;
    for (int64_t i = 0; i < queries; ++i, values += width) {
        const int64_t query_head = head * group + i % group;
        const int64_t at = ((token + i / group) * call.shape.heads * group + query_head) * size;
        T *out = static_cast<T *>(call.out) + at;
        const F32 share = splat(output_scale<T>(call, sums.top[i], sums.mass[i], query_head));
        for (int64_t d = 0; d < size; d += LANES) {
            // Adding zero makes one zero of both: the sign of a zero product may depend on keys
            // beyond the query.
            const F32 mixed = fma(load(values + d), share, zeros());
            if (size - d < LANES) store(out + d, mixed, static_cast<int>(size - d));
            else store(out + d, mixed);
        }
    }
}

// The block of a task's keys that begins at `begin`; nothing of it is read beyond the task's end.
template <class T>
INLINE KeyBlock block_at(const AttentionCall &call, const AttentionTask &task, int64_t begin) {
    const int64_t from = seen_from(call, task, task.position).from - begin;
    const int64_t end = seen_from(call, task, task.position + task.queries - 1).until;
    const int64_t until = (end < task.key_end ? end : task.key_end) - begin;
    return {
        begin, static_cast<int>(from > 0 ? from : 0),
        static_cast<int>(until < BLOCK_KEYS<T> ? until : BLOCK_KEYS<T>)};
}

template <class T>
INLINE KeyBlock first_block(const AttentionCall &call, const AttentionTask &task) {
    const int64_t unseen = seen_from(call, task, task.position).from;
    const int64_t begin = unseen > task.key_begin ? unseen : task.key_begin;
    return block_at<T>(call, task, begin / BLOCK_KEYS<T> * BLOCK_KEYS<T>);
}

// A slot for the sums of a segment whose queries have one token.
INLINE AttentionSums slot_at(const AttentionCall &call, int64_t slot, int64_t width) {
    const int64_t group = call.shape.queries_per_head;
    float *at = call.partials + slot * slot_floats(group, call.shape.head_size);
    return {at, at + group * width, at + group * (width + 1)};
}

// The queries of a task attend to its blocks, one after the other; K is what keys and values are kept as.
// The `following` task is most likely this thread's next one.
template <class T, class K>
static void attend_kept_as(
    const AttentionCall &call, const AttentionTask &task, const AttentionTask *following) {
    static thread_local Scratch scratch;
    const int64_t group = call.shape.queries_per_head, window = call.shape.window;
    AttentionScratch<T> room(scratch, call, task);
    BlockReader<T, K> reader(call, task, room.head, room.widen);
    AmxTiles amx;
    // Tiles that compute with a block for long are held up more by prefetches than helped.
    const bool prefetches = !USES_AMX<T> || room.queries <= AMX_ROWS;
    AttentionTask one = task;  // a head of the task
    if constexpr (USES_AMX<T>) {
        if (task.heads == 1) gather_queries(call, task, room);
    }
    bool joined = false;
    for (KeyBlock block = first_block<T>(call, task); block.until > 0;) {
        const KeyBlock next = block_at<T>(call, task, block.begin + BLOCK_KEYS<T>);
        // Queries that see only what is before the block are left out, and those whose window lies
        // behind it.
        const int64_t unseen = block.begin + 1 - seen_from(call, task, task.position).until;
        const int64_t first = unseen > 0 ? unseen : 0;
        const int64_t seeing = block.begin + block.until + window - 1 - task.position;
        const int64_t last = window && seeing < task.queries ? seeing : task.queries;
        for (int64_t i = 0; i < task.heads; ++i) {
            one.head = static_cast<int32_t>(task.head + i);
            if (prefetches) {
                if (i + 1 < task.heads) room.ahead.begin(task, block, one.head + 1);
                else if (next.until > 0) room.ahead.begin(task, next, task.head);
                else if (following)
                    room.ahead.begin(*following, first_block<T>(call, *following), following->head);
            }
            reader.read(block, one.head);
            room.sums = room.all.from(i * room.rows, room.width);
            if constexpr (USES_AMX<T>) {
                if (task.heads > 1) gather_queries(call, one, room);
                attend_amx(call, one, first * group, last * group, block, room, amx);
            } else {
                attend_in_tiles<T, K>(call, one, first * group, last * group, block, room);
            }
        }
        if (next.until <= 0 || next.begin % SEGMENT_KEYS == 0) {
            const int64_t every = task.heads * room.rows;
            if (task.partial >= 0) {
                const int64_t segment = (block.begin - task.key_begin) / SEGMENT_KEYS;
                for (int64_t i = 0; i < task.heads; ++i) {
                    const int64_t at = task.partial + i * task.partial_step + segment;
                    const AttentionSums slot = slot_at(call, at, room.width);
                    const AttentionSums sums = room.all.from(i * room.rows, room.width);
                    slot.clear(room.queries, room.width);
                    join_sums(slot, sums, room.queries, room.width);
                }
            } else if (joined) {
                join_sums(room.totals, room.all, every, room.width);
            } else {
                std::swap(room.totals, room.all);
                joined = true;
            }
            if (next.until > 0) room.all.clear(every, room.width);
        }
        block = next;
    }
    if (task.partial >= 0) return;
    for (int64_t i = 0; i < task.heads; ++i) {
        const AttentionSums sums = room.totals.from(i * room.rows, room.width);
        write_out<T>(call, task.token, task.head + i, sums, room.queries, room.width);
    }
}

template <class T>
static void attend(
    const AttentionCall &call, const AttentionTask &task, const AttentionTask *following) {
    switch (call.shape.format) {
        case CacheFormat::model: return attend_kept_as<T, T>(call, task, following);
        case CacheFormat::e4m3: return attend_kept_as<T, E4m3>(call, task, following);
        case CacheFormat::e5m2: return attend_kept_as<T, E5m2>(call, task, following);
    }
}

// The segments of a query as its result.
template <class T> static void merge(const AttentionCall &call, const AttentionMerge &merge) {
    const int64_t group = call.shape.queries_per_head;
    const int64_t width = ceil_div(call.shape.head_size, LANES) * LANES;
    const AttentionSums sums = slot_at(call, merge.partial, width);
    for (int64_t i = 1; i < merge.segments; ++i)
        join_sums(sums, slot_at(call, merge.partial + i, width), group, width);
    write_out<T>(call, merge.token, merge.head, sums, group, width);
}

}  // namespace ISA_NS
