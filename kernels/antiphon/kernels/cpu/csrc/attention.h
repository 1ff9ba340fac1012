// A task of attention: its queries go through the blocks of their keys (attention_block.h).

#pragma once

#include "amx.h"
#include "amx_attention.h"
#include "attention_block.h"
#include "layout.h"
#include "simd.h"
#include "team.h"

namespace ISA_NS {

template <class T, int R = TILE_QUERIES>
INLINE void attend_tile_of(
    int64_t queries, const AttentionCall &call, const AttentionTask &task, int64_t head,
    int64_t first, const KeyBlock &block, AttentionScratch<T> &room) {
    if constexpr (R > 1) {
        if (queries < R)
            return attend_tile_of<T, R - 1>(queries, call, task, head, first, block, room);
    }
    attend_tile<T, R>(call, task, head, first, block, room);
}

// Queries `first` to `last` - 1 of the task's, all of one head, meet a block that is laid out.
template <class T>
INLINE void attend_in_tiles(
    const AttentionCall &call, const AttentionTask &task, int64_t head, int64_t first, int64_t last,
    const KeyBlock &block, AttentionScratch<T> &room) {
    const int64_t tiles = ceil_div(last - first, TILE_QUERIES);
    for (int64_t i = 0; i < tiles; ++i) {
        // Tiles of like height: 7 queries are 4 and 3.
        const int64_t height = ceil_div(last - first, tiles - i);
        attend_tile_of<T>(height, call, task, head, first, block, room);
        first += height;
    }
}

// The weighted sums (rows, width) divided by the weights (rows,), as the rows of the result.
template <class T>
INLINE void write_out(
    const AttentionCall &call, const AttentionTask &task, const float *sums, int64_t width,
    const float *mass) {
    const int64_t group = call.shape.queries_per_head, size = call.shape.head_size;
    for (int64_t head = 0, row = 0; head < task.heads; ++head)
        for (int64_t i = 0; i < task.queries * group; ++i, ++row, sums += width) {
            const int64_t token = task.token + i / group;
            const int64_t query_head = (task.head + head) * group + i % group;
            const int64_t at = (token * call.shape.heads * group + query_head) * size;
            T *out = static_cast<T *>(call.out) + at;
            const F32 inverse = splat(call.cache.value_scale / mass[row]);
            for (int64_t d = 0; d < size; d += LANES) {
                // Adding zero makes one zero of both: the sign of a zero product may depend on
                // keys beyond the query.
                const F32 mixed = fma(load(sums + d), inverse, zeros());
                if (size - d < LANES) store(out + d, mixed, static_cast<int>(size - d));
                else store(out + d, mixed);
            }
        }
}

// The block of a task's keys that begins at `begin`; nothing of it is read beyond the task's end.
template <class T>
INLINE KeyBlock block_at(const AttentionCall &call, const AttentionTask &task, int64_t begin) {
    const int64_t from = seen_from(call, task, task.position).from - begin;
    const int64_t until = seen_from(call, task, task.position + task.queries - 1).until - begin;
    return {
        begin, static_cast<int>(from > 0 ? from : 0),
        static_cast<int>(until < BLOCK_KEYS<T> ? until : BLOCK_KEYS<T>)};
}

template <class T>
INLINE KeyBlock first_block(const AttentionCall &call, const AttentionTask &task) {
    const int64_t unseen = seen_from(call, task, task.position).from;
    return block_at<T>(call, task, unseen / BLOCK_KEYS<T> * BLOCK_KEYS<T>);
}

// Where the tokens of the next block lie; after the last one, those of the first block of the task
// that most likely follows.
template <class T>
INLINE void next_token_offsets(
    const AttentionCall &call, const AttentionTask &task, const AttentionTask *following,
    const KeyBlock &next, int64_t (&offsets)[KEYS]) {
    const bool alike = following && following->head == task.head && following->heads == task.heads;
    if (next.until <= 0 && alike)
        token_offsets(call, following->row, first_block<T>(call, *following), offsets);
    else token_offsets(call, task.row, next, offsets);
}

// Bytes of a number of the cache.
INLINE int item_bytes(const CacheShape &shape) {
    if (shape.format != CacheFormat::model) return 1;
    return shape.dtype == Dtype::bf16 ? sizeof(bf16) : sizeof(float);
}

// Where the keys and values of a task's first head begin in the cache.
struct TaskBases {
    const char *keys, *values;

    TaskBases(const AttentionCall &call, const AttentionTask &task) {
        const int64_t before = task.head * call.shape.head_size * item_bytes(call.shape);
        keys = static_cast<const char *>(call.cache.keys) + before;
        values = static_cast<const char *>(call.cache.values) + before;
    }
};

INLINE TokenPrefetcher ahead_of(const AttentionCall &call, const AttentionTask &task) {
    const int64_t item = item_bytes(call.shape);
    return {task.heads * call.shape.head_size * item, item};
}

// Call `body` with a number of what keys and values are kept as.
template <class T, class Body> INLINE void by_cache_format(const CacheShape &shape, Body &&body) {
    switch (shape.format) {
        case CacheFormat::model: return body(T());
        case CacheFormat::e4m3: return body(E4m3());
        case CacheFormat::e5m2: return body(E5m2());
    }
}

// Call `body` for each block of a task's keys, with where its tokens lie and those that come next.
template <class T, class Body>
INLINE void through_blocks(
    const AttentionCall &call, const AttentionTask &task, const AttentionTask *following,
    int64_t (&offsets)[2][KEYS], Body &&body) {
    KeyBlock block = first_block<T>(call, task);
    token_offsets(call, task.row, block, offsets[0]);
    for (int side = 0; block.until > 0; side ^= 1) {
        const KeyBlock next = block_at<T>(call, task, block.begin + BLOCK_KEYS<T>);
        next_token_offsets<T>(call, task, following, next, offsets[side ^ 1]);
        body(block, offsets[side], offsets[side ^ 1]);
        block = next;
    }
}

template <class T>
static void attend(
    const AttentionCall &call, const AttentionTask &task, const AttentionTask *following) {
    static thread_local Scratch scratch;
    const int64_t group = call.shape.queries_per_head, window = call.shape.window;
    const TaskBases bases(call, task);
    AttentionScratch<T> room(scratch, call, task, ahead_of(call, task));
    AmxTiles squares;
    if constexpr (USES_AMX<T>) gather_queries(call, task, room);
    const auto meet = [&](const KeyBlock &block, const int64_t *offsets, const int64_t *coming) {
        room.ahead.begin({bases.keys, coming, KEYS}, {bases.values, coming, KEYS}, {});
        // Queries that see only what is before the block are left out, and those whose window lies
        // behind it.
        const int64_t unseen = block.begin + 1 - seen_from(call, task, task.position).until;
        const int64_t first = unseen > 0 ? unseen : 0;
        const int64_t seeing = block.begin + block.until + window - 1 - task.position;
        const int64_t last = window && seeing < task.queries ? seeing : task.queries;
        for (int64_t head = 0; head < task.heads; ++head) {
            by_cache_format<T>(call.shape, [&](auto kept) {
                transpose_block<T, decltype(kept)>(call, task.head + head, block, offsets, room);
            });
            if constexpr (USES_AMX<T>)
                attend_amx(call, task, head, first * group, last * group, block, room, squares);
            else attend_in_tiles(call, task, head, first * group, last * group, block, room);
        }
    };
    through_blocks<T>(call, task, following, room.offsets, meet);
    write_out<T>(call, task, room.sums, room.width, room.mass);
}

}  // namespace ISA_NS
