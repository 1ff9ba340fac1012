#include "rows.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "bindings.h"
#include "kv_layout.h"

namespace {

// Queries times query heads of a task: enough that finding a block of keys, and loading it into the
// first-level cache, costs little.
constexpr int64_t TASK_QUERIES = 192;

// And a multiple of the tiles' heights, where there are enough.
constexpr int64_t EVEN_QUERIES = 16;

// So that products of sizes and positions fit their numbers.
constexpr int64_t SIZE_MOST = INT32_MAX;

// With fewer tasks a thread, long rows are shared out: the last to finish is waited for.
constexpr int64_t TASKS_A_THREAD = 8;

// With so many tasks a thread, even if each has all heads of a query, each does.
constexpr int64_t WHOLE_TASKS_A_THREAD = 4;

}  // namespace

AttentionMetadata::AttentionMetadata(
    int64_t page_tokens, int64_t heads, int64_t queries_per_head, int64_t head_size, int64_t window,
    bool bidirectional, Ints tables, Ints query_len, const Ints &kv_len)
    : shape_{
          .dtype = Dtype::f32,
          .format = CacheFormat::model,
          .pages = 0,
          .page_tokens = page_tokens,
          .heads = heads,
          .queries_per_head = queries_per_head,
          .head_size = head_size,
          .window = window,
          .bidirectional = bidirectional},
      tables_(std::move(tables)),
      query_len_(std::move(query_len)),
      kv_len_(kv_len.data(), kv_len.data() + kv_len.size()) {
    const int64_t rows = query_len_.size();
    TORCH_CHECK(rows > 0, "a pass has rows");
    for (const int64_t size : {page_tokens, heads, queries_per_head, head_size})
        TORCH_CHECK(0 < size && size <= SIZE_MOST, "sizes are positive, and none is ", size);
    TORCH_CHECK(0 <= window && window <= SIZE_MOST, "no window has ", window, " tokens");
    TORCH_CHECK(head_size % 2 == 0, "the head size is even");
    TORCH_CHECK(
        tables_.ndim() == 2 && tables_.shape(0) == rows && query_len_.ndim() == 1 &&
            kv_len.ndim() == 1 && kv_len.size() == rows,
        "a table, a query length and a kv length a row");
    for (int64_t row = 0; row < rows; ++row) place(row);
    cut();
}

void AttentionMetadata::advance(const Ints &tables) {
    TORCH_CHECK(one_each(), "only rows of one token each go on");
    TORCH_CHECK(tables.ndim() == 2 && tables.shape(0) == rows(), "a table a row");
    int64_t needed = 0;
    for (int64_t row = 0; row < rows(); ++row) {
        const int64_t begin = kv_len_[row];
        needed = std::max(needed, pages_of(row, tables, begin, begin + 1));
    }
    tables_ = tables;
    pages_needed_ = needed;
    const int64_t size = shape_.page_tokens, slots = page_slots(size);
    const int64_t columns = tables_.shape(1);
    const int32_t *table = tables_.data();
    bool recut = false;
    for (int64_t row = 0; row < rows(); ++row, table += columns) {
        const int64_t position = kv_len_[row]++;
        // A row has a segment more, or its window has left one.
        recut |= position % SEGMENT_KEYS == 0;
        recut |= shape_.window && (position + 1 - shape_.window) % SEGMENT_KEYS == 0;
        places_[row] = table[position / size] * slots + position % size;
    }
    // One may have become longer than the one before it: their order is for speed alone.
    for (AttentionTask &task : tasks_) ++task.position;
    if (recut) cut();
}

PagedRows AttentionMetadata::paged() const {
    return {
        .rows = rows(),
        .stride = tables_.shape(1),
        .tables = tables_.data(),
        .query_len = query_len_.data(),
        .kv_len = kv_len_.data(),
    };
}

CacheShape AttentionMetadata::shape_in(Dtype dtype, CacheFormat format, int64_t pages) const {
    TORCH_CHECK(pages_needed_ <= pages, "a row has page ", pages_needed_ - 1, " of ", pages);
    CacheShape shape = shape_;
    shape.dtype = dtype;
    shape.format = format;
    shape.pages = pages;
    return shape;
}

void AttentionMetadata::cut() {
    const int64_t group = shape_.queries_per_head;
    const int64_t unit = EVEN_QUERIES / std::gcd(EVEN_QUERIES, group);
    const int64_t most = std::max<int64_t>(TASK_QUERIES / group / unit, 1) * unit;
    const bool few = rows() * shape_.heads < TASKS_A_THREAD * threads();
    int64_t whole_tasks = 0, keys = 0;  // if each has all heads of a query
    for (int64_t row = 0; row < rows(); ++row) {
        if (query_len_.data()[row] != 1) continue;
        whole_tasks += few ? segments_of(kv_len_[row] - 1).count : 1;
        keys += kv_len_[row];
    }
    const int64_t wanted = WHOLE_TASKS_A_THREAD * threads();
    const bool whole = whole_tasks >= wanted;
    // A row that is much longer than others is shared out, too.
    const int64_t longest = few ? 0 : whole ? keys / wanted : INT64_MAX;
    tasks_.clear();
    merges_.clear();
    partials_.clear();
    int64_t token = 0;
    for (int64_t row = 0; row < rows(); ++row) {
        const int64_t queries = query_len_.data()[row], end = kv_len_[row];
        const int64_t heads = whole && queries == 1 ? shape_.heads : 1;
        for (int64_t first = 0; first < queries; first += most)
            for (int64_t head = 0; head < shape_.heads; head += heads) {
                const AttentionTask task = {
                    .row = static_cast<int32_t>(row),
                    .queries = static_cast<int32_t>(std::min(most, queries - first)),
                    .head = static_cast<int32_t>(head),
                    .heads = static_cast<int32_t>(heads),
                    .token = token + first,
                    .position = end - queries + first,
                    .key_begin = 0,
                    .key_end = INT64_MAX,
                    .partial = -1,
                    .partial_step = 0,
                };
                if (queries == 1 && end > longest) share_out(task);
                else tasks_.push_back(task);
            }
        token += queries;
    }
    // Long ones first: what is left for the end is short. Of a prompt, those of a head follow each
    // other, and find its keys in the cache of their core.
    const auto whole_row = [this](const AttentionTask &task) {
        const int64_t queries = query_len_.data()[task.row];
        return queries == 1 ? cost(task) : queries * kv_len_[task.row];
    };
    std::stable_sort(tasks_.begin(), tasks_.end(), [&](const auto &a, const auto &b) {
        const int64_t left = whole_row(a), right = whole_row(b);
        if (left != right) return left > right;
        if (a.row != b.row) return a.row < b.row;
        if (a.head != b.head) return a.head < b.head;
        return cost(a) > cost(b);
    });
}

// About how long a task takes, in keys.
int64_t AttentionMetadata::cost(const AttentionTask &task) const {
    const int64_t seen = shape_.bidirectional ? kv_len_[task.row] : task.position + task.queries;
    return (std::min(seen, task.key_end) - task.key_begin) * task.queries * task.heads;
}

// The segments that the query at a position sees.
AttentionMetadata::Segments AttentionMetadata::segments_of(int64_t position) const {
    const int64_t unseen = shape_.window ? position + 1 - shape_.window : 0;
    const int64_t first = std::max<int64_t>(unseen, 0) / SEGMENT_KEYS;
    return {first, position / SEGMENT_KEYS + 1 - first};
}

// A task a segment of the keys of one query.
void AttentionMetadata::share_out(const AttentionTask &task) {
    const auto [first, segments] = segments_of(task.position);
    if (segments == 1) return tasks_.push_back(task);
    const int64_t each = slot_floats(shape_.queries_per_head, shape_.head_size);
    const int64_t slot = static_cast<int64_t>(partials_.size()) / each;
    for (int32_t i = 0; i < task.heads; ++i)
        merges_.push_back({task.head + i, task.token, slot + i * segments, segments});
    partials_.resize((slot + task.heads * segments) * each);
    for (int64_t i = 0; i < segments; ++i) {
        AttentionTask part = task;
        part.key_begin = (first + i) * SEGMENT_KEYS;
        part.key_end = i + 1 < segments ? part.key_begin + SEGMENT_KEYS : INT64_MAX;
        part.partial = slot + i;
        part.partial_step = segments;
        tasks_.push_back(part);
    }
}

void AttentionMetadata::place(int64_t row) {
    const int64_t size = shape_.page_tokens, slots = page_slots(size);
    const int64_t queries = query_len_.data()[row];
    const int64_t end = kv_len_[row], begin = end - queries;
    TORCH_CHECK(
        0 < queries && queries <= end, "row ", row, " has ", queries, " of ", end, " tokens");
    TORCH_CHECK(
        !shape_.bidirectional || queries == end, "row ", row, " has ", queries, " of ", end,
        " tokens, and sees those to come");
    pages_needed_ = std::max(pages_needed_, pages_of(row, tables_, begin, end));
    const int32_t *table = tables_.data() + row * tables_.shape(1);
    for (int64_t position = begin; position < end; ++position)
        places_.push_back(table[position / size] * slots + position % size);
}

// How many pages a cache has that holds all which a row's tokens [begin, end) read or write.
int64_t AttentionMetadata::pages_of(
    int64_t row, const Ints &tables, int64_t begin, int64_t end) const {
    const int64_t size = shape_.page_tokens, columns = tables.shape(1);
    const int64_t first = shape_.window ? std::max<int64_t>(begin + 1 - shape_.window, 0) : 0;
    const int64_t page = first / size, last = (end - 1) / size;
    const int32_t *table = tables.data() + row * columns;
    int32_t least = last < columns ? 0 : -1, most = 0;
    for (int64_t i = page; i <= last && i < columns; ++i) {
        least = std::min(least, table[i]);
        most = std::max(most, table[i]);
    }
    TORCH_CHECK(least >= 0, "row ", row, " reads or writes a token that has no page");
    return int64_t{most} + 1;
}
