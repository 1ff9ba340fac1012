// A block of one head's keys and values as registers read them: where they lie in the cache
// (kv_layout.h), or copied, if they are in eight bits, in pages of no whole vectors, or latents.

#pragma once

#include "amx.h"
#include "fp8.h"
#include "kv_layout.h"
#include "layout.h"
#include "simd.h"

namespace ISA_NS {

// Sums are taken up and put down once a block. Of 128 keys rather than 64, prefill of heads of 64 took
// 5 % less on a Zen 5, of 128 2 % less; of floats they would leave the first-level cache.
static constexpr int KEYS = ANTIPHON_AVX512 ? 128 : 64;
template <class T> static constexpr int BLOCK_KEYS = std::is_same_v<T, bf16> ? KEYS : 64;
static constexpr int KEY_VECTORS = KEYS / LANES;

// The keys of a block that any query may attend to, [begin + from, begin + until).
struct KeyBlock {
    int64_t begin;
    int from, until;

    int first_vector() const { return from / LANES; }
    int vectors() const { return (until + LANES - 1) / LANES; }
};

// Bytes of a number of the cache.
INLINE int64_t item_bytes(const CacheShape &shape) {
    if (shape.format != CacheFormat::model) return 1;
    return shape.dtype == Dtype::bf16 ? sizeof(bf16) : sizeof(float);
}

INLINE const int32_t *table_of(const PagedRows &rows, int64_t row) {
    return rows.tables + row * rows.stride;
}

// Where a row of words of T goes on after some of them, if they are kept as K: codes are shorter.
template <class T, class K> INLINE const K *words_after(const uint32_t *row, int64_t words) {
    return reinterpret_cast<const K *>(row) + words * WORD_VALUES<T>;
}

// What a block is read as, and room for what is copied.
template <class T> struct HeadBlock {
    // Of sixteen keys each: word w is key_stride words after the one before (words_after). Of vectors
    // that no query attends to it is any memory that may be read, and so is what follows the last
    // token of a vector.
    const uint32_t *keys[KEY_VECTORS];
    int64_t key_stride;
    const uint32_t
        *values[KEYS / WORD_VALUES<T>];  // (D,) words each, of as many keys as a word has

    int64_t words, width;  // words of a head; columns of a row of values, whole vectors
    uint32_t *key_room;    // (words, KEYS)
    uint32_t *value_room;  // (KEYS / W, width)
    uint32_t *row_room;    // (LANES, width) keys of a vector, a row each
};

template <class T, class K> class BlockReader {
  public:
    // What is in eight bits is copied, or left to tiles that widen it.
    BlockReader(
        const AttentionCall &call, const AttentionTask &task, HeadBlock<T> &to, bool tiles_widen)
        : call_(call),
          layout_(call.shape),
          table_(table_of(call.rows, task.row)),
          whole_(call.shape.page_tokens % LANES == 0),
          to_(to) {
        const bool lie = !IN_BYTES<K> || tiles_widen;
        // Tiles of AMX have whole steps of words and of keys.
        keys_lie_ = lie && whole_ && (!USES_AMX<T> || to.words % AMX_ROWS == 0);
        const bool steps_lie = !USES_AMX<T> || layout_.page_tokens % STEP == 0;
        values_lie_ = lie && steps_lie && layout_.head_size % LANES == 0;
        to_.key_stride = keys_lie_ ? layout_.tokens : KEYS;
    }

    void read(const KeyBlock &block, int64_t head) {
        head_ = head;
        if constexpr (USES_AMX<T>)
            for (int i = 0; i < KEYS / VALUES; ++i) to_.values[i] = value_row(i);
        for (int v = block.first_vector(); v < block.vectors(); ++v) {
            read_keys(block, v);
            if (call_.cache.values == nullptr) turn_keys(v);
            else read_values(block, v);
        }
        for (int v = 0; v < KEY_VECTORS; ++v)
            if (v < block.first_vector() || v >= block.vectors())
                to_.keys[v] = to_.keys[block.first_vector()];
        cut_edges(block);
        if constexpr (USES_AMX<T>) clear_outside(block);
    }

  private:
    static constexpr int VALUES = WORD_VALUES<T>;

    const K *head_of(const void *cache, int64_t position) const {
        const int64_t page = table_[position / layout_.page_tokens];
        return static_cast<const K *>(cache) + call_.cache.head_at(page, head_);
    }
    int64_t offset_of(int64_t position) const { return position % layout_.page_tokens; }

    void read_keys(const KeyBlock &block, int v) {
        const int64_t position = block.begin + v * LANES;
        to_.keys[v] = to_.key_room + v * LANES;
        if (!whole_) return gather_keys(block, v);
        const K *from = head_of(call_.cache.keys, position) + layout_.key_at(offset_of(position));
        if (keys_lie_) to_.keys[v] = words_of(from);
        else copy_panel<T>(from, layout_.key_step(), to_.words, to_.key_room + v * LANES, KEYS);
    }

    // Page by page; of one that no query attends to there may be none.
    void gather_keys(const KeyBlock &block, int v) {
        const int end = (v + 1) * LANES;
        for (int key = v * LANES; key < end;) {
            const int64_t position = block.begin + key, offset = offset_of(position);
            const int64_t left = layout_.page_tokens - offset;
            const int count = left < end - key ? static_cast<int>(left) : end - key;
            uint32_t *to = to_.key_room + key;
            if (block.from < key + count && key < block.until) {
                copy_keys(head_of(call_.cache.keys, position) + layout_.key_at(offset), count, to);
            } else {
                for (int64_t w = 0; w < to_.words; ++w)
                    std::memset(to + w * KEYS, 0, count * sizeof(uint32_t));
            }
            key += count;
        }
    }

    void copy_keys(const K *from, int count, uint32_t *to) {
        for (; count >= 8; count -= 8, from += 8 * VALUES, to += 8) copy_keys_of<8>(from, to);
        for (; count >= 4; count -= 4, from += 4 * VALUES, to += 4) copy_keys_of<4>(from, to);
        for (; count > 0; --count, from += VALUES, ++to) copy_keys_of<1>(from, to);
    }
    template <int N> void copy_keys_of(const K *from, uint32_t *to) {
        for (int64_t w = 0; w < to_.words; ++w, from += layout_.key_step(), to += KEYS) {
            if constexpr (!IN_BYTES<K>) std::memcpy(to, from, N * sizeof(uint32_t));
            else
                for (int i = 0; i < N; ++i) to[i] = word_of<T>(from + i * VALUES);
        }
    }

    const K *value_at(int64_t position) const {
        return head_of(call_.cache.values, position) + layout_.value_at(offset_of(position));
    }

    void read_values(const KeyBlock &block, int v) {
        const int64_t size = layout_.head_size;
        if (layout_.page_tokens % VALUES != 0) return gather_values(block, v);
        const K *vector = whole_ ? value_at(block.begin + v * LANES) : nullptr;
        for (int i = 0; i < LANES / VALUES; ++i) {
            const int key = v * LANES + i * VALUES, word = key / VALUES;
            to_.values[word] = value_row(word);
            // Of one that no query attends to there may be no page.
            if (!whole_ && (key + VALUES <= block.from || block.until <= key)) continue;
            const K *from = whole_ ? vector + i * VALUES * size : value_at(block.begin + key);
            if (value_lies(block, v)) to_.values[word] = words_of(from);
            else copy_words<T>(from, size, value_row(word));
        }
    }

    // Of a step of AMX what no query attends to is zero, and so it is copied.
    bool value_lies(const KeyBlock &block, int v) const {
        if constexpr (!USES_AMX<T>) return values_lie_;
        const int first = v * LANES / STEP * STEP;
        return values_lie_ && block.from <= first && first + STEP <= block.until;
    }

    void gather_values(const KeyBlock &block, int v) {
        for (int i = v * LANES / VALUES; i < (v + 1) * LANES / VALUES; ++i) {
            const K *rows[VALUES];
            for (int j = 0; j < VALUES; ++j) {
                const int key = i * VALUES + j;
                const int64_t position = block.begin + key;
                const bool seen = block.from <= key && key < block.until;
                rows[j] = seen ? value_at(position) : nullptr;
            }
            uint32_t *to = value_row(i);
            for (int64_t d = 0; d < layout_.head_size; ++d) {
                uint32_t word = 0;
                for (int j = 0; j < VALUES; ++j)
                    if (rows[j]) word |= number_bits<T>(rows[j] + d * VALUES) << 16 * j;
                to[d] = word;
            }
            to_.values[i] = to;
        }
    }

    // Latents: the values of a vector are its keys.
    void turn_keys(int v) {
        for (int64_t w = 0; w < to_.words; w += LANES) {
            const uint32_t *rows[LANES];
            for (int64_t r = 0; r < LANES; ++r)
                rows[r] = to_.keys[v] + (w + r < to_.words ? w + r : w) * to_.key_stride;
            transpose(rows, LANES, to_.row_room + w, to_.width);
        }
        for (int i = 0; i < LANES; i += VALUES) {
            const int index = (v * LANES + i) / VALUES;
            const auto *first = reinterpret_cast<const T *>(to_.row_room + i * to_.width);
            const auto *second =
                reinterpret_cast<const T *>(to_.row_room + (i + VALUES - 1) * to_.width);
            lay_side_by_side(first, second, layout_.head_size, value_row(index));
            to_.values[index] = value_row(index);
        }
    }

    // What lies beside the first and the last key in a word may be anything.
    void cut_edges(const KeyBlock &block) {
        if constexpr (VALUES == 2) {
            if (block.from % 2) keep(block.from / 2, 1);
            if (block.until % 2) keep(block.until / 2, 0);
        }
    }
    // Keep the first or the second key of a word alone.
    void keep(int i, int which) {
        if (values_lie_) keep_of<K>(i, which);
        else keep_of<T>(i, which);
    }
    template <class N> void keep_of(int i, int which) {
        const auto *from = reinterpret_cast<const N *>(to_.values[i]);
        auto *to = reinterpret_cast<N *>(value_row(i));
        for (int64_t d = 0; d < layout_.head_size; ++d) {
            to[2 * d + which] = from[2 * d + which];
            to[2 * d + 1 - which] = N{};
        }
        to_.values[i] = value_row(i);
    }

    // Keys that no query attends to weigh nothing, and so must be numbers, in whole steps of AMX.
    void clear_outside(const KeyBlock &block) {
        const int first = block.from / VALUES, last = ceil_div(block.until, VALUES);
        const int end = ceil_div(block.until, STEP) * STEP / VALUES;
        std::memset(value_row(0), 0, first * to_.width * sizeof(uint32_t));
        std::memset(value_row(last), 0, (end - last) * to_.width * sizeof(uint32_t));
    }

    uint32_t *value_row(int i) { return to_.value_room + i * to_.width; }

    const AttentionCall &call_;
    const KvLayout layout_;
    const int32_t *table_;
    int64_t head_ = 0;
    const bool whole_;
    bool keys_lie_, values_lie_;
    HeadBlock<T> &to_;
};

// Asks the memory for a block to come, a few lines at a time between the products of what is there:
// the hardware looks ahead within a page, but does not see where the next one lies.
class BlockPrefetcher {
  public:
    // A block is met in so many steps.
    BlockPrefetcher(const AttentionCall &call, int64_t steps)
        : layout_(call.shape),
          rows_(call.rows),
          cache_(call.cache),
          item_(item_bytes(call.shape)),
          sides_(call.cache.values == nullptr ? 1 : 2),
          steps_(steps) {}

    // From now on, ask for a head of the pages of a block that begin in it.
    void begin(const AttentionTask &task, const KeyBlock &block, int64_t head) {
        const int64_t size = layout_.page_tokens;
        table_ = table_of(rows_, task.row);
        head_ = head;
        const int64_t seen = (block.begin + block.from) / size;
        first_ = ceil_div(block.begin, size);
        first_ = page_ = first_ > seen ? first_ : seen;
        end_ = ceil_div(block.begin + block.until, size);
        side_ = 0;
        left_ = first_ < end_ ? sides_ * (end_ - first_) * page_lines() : 0;
        lines_ = ceil_div(left_, steps_);
        in_page_ = 0;
    }

    __attribute__((always_inline)) void step() {
        if (left_ > 0) ask();
    }

  private:
    static constexpr int64_t LINE = 64;
    // Into which level: as measured, by the kind of processor (ADR 40).
    static constexpr auto LEVEL = ANTIPHON_AMX ? _MM_HINT_T1 : _MM_HINT_T0;

    int64_t page_lines() const { return ceil_div(layout_.head_numbers() * item_, LINE); }

    __attribute__((always_inline)) void ask() {
        for (int64_t i = 0; i < lines_ && left_ > 0; ++i, --left_, --in_page_, at_ += LINE) {
            if (in_page_ == 0) next_page();
            _mm_prefetch(at_, LEVEL);
        }
        // GCC takes a function that does nothing else for one that does nothing.
        __asm__ volatile("" ::: "memory");
    }

    void next_page() {
        if (page_ == end_) {
            page_ = first_;
            ++side_;
        }
        const void *side = side_ == 0 ? cache_.keys : cache_.values;
        at_ = static_cast<const char *>(side) + cache_.head_at(table_[page_++], head_) * item_;
        in_page_ = page_lines();
    }

    const KvLayout layout_;
    const PagedRows &rows_;
    const LayerCache &cache_;
    const int64_t item_;
    const int sides_;
    const int64_t steps_;
    const int32_t *table_ = nullptr;
    int64_t head_ = 0, first_ = 0, page_ = 0, end_ = 0;
    int side_ = 0;
    int64_t left_ = 0, lines_ = 0, in_page_ = 0;
    const char *at_ = nullptr;
};

}  // namespace ISA_NS
