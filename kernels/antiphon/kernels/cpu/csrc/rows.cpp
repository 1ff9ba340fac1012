#include "rows.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "bindings.h"

namespace {

// Queries times query heads of a task: enough that laying out a block of keys costs little.
constexpr int64_t TASK_QUERIES = 96;

// And a multiple of the tiles' heights, where there are enough.
constexpr int64_t EVEN_QUERIES = 16;

// So that products of sizes and positions fit their numbers.
constexpr int64_t SIZE_MOST = INT32_MAX;

// About how long a task takes, in keys, of which its last query sees so many.
int64_t cost(const AttentionTask &task, int64_t keys) { return keys * task.queries * task.heads; }

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
    const bool many = rows >= 4 * threads();
    for (int64_t row = 0; row < rows; ++row) {
        cut(row, many ? heads : 1);
        place(row);
    }
    // Long ones first: what is left for the end is short.
    const auto keys = [&](const AttentionTask &task) {
        return bidirectional ? kv_len_[task.row] : task.position + task.queries;
    };
    std::stable_sort(tasks_.begin(), tasks_.end(), [&](const auto &a, const auto &b) {
        return cost(a, keys(a)) > cost(b, keys(b));
    });
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
    const int64_t size = shape_.page_tokens, columns = tables_.shape(1);
    const int32_t *table = tables_.data();
    for (int64_t row = 0; row < rows(); ++row, table += columns) {
        const int64_t position = kv_len_[row]++;
        places_[row] = table[position / size] * size + position % size;
    }
    // One may have become longer than the one before it: their order is for speed alone.
    for (AttentionTask &task : tasks_) ++task.position;
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

void AttentionMetadata::cut(int64_t row, int64_t heads_together) {
    const int64_t queries = query_len_.data()[row], end = kv_len_[row];
    TORCH_CHECK(
        0 < queries && queries <= end, "row ", row, " has ", queries, " of ", end, " tokens");
    TORCH_CHECK(
        !shape_.bidirectional || queries == end, "row ", row, " has ", queries, " of ", end,
        " tokens, and sees those to come");
    const int64_t unit = EVEN_QUERIES / std::gcd(EVEN_QUERIES, shape_.queries_per_head);
    const int64_t most = std::max<int64_t>(TASK_QUERIES / shape_.queries_per_head / unit, 1) * unit;
    // All heads of a short row are read together, since they lie beside each other in a page.
    const int64_t heads = queries > 1 ? 1 : heads_together;
    for (int64_t first = 0; first < queries; first += most)
        for (int64_t head = 0; head < shape_.heads; head += heads)
            tasks_.push_back({
                .row = static_cast<int32_t>(row),
                .queries = static_cast<int32_t>(std::min(most, queries - first)),
                .head = static_cast<int32_t>(head),
                .heads = static_cast<int32_t>(heads),
                .token = tokens() + first,
                .position = end - queries + first,
            });
}

void AttentionMetadata::place(int64_t row) {
    const int64_t size = shape_.page_tokens;
    const int64_t end = kv_len_[row], begin = end - query_len_.data()[row];
    pages_needed_ = std::max(pages_needed_, pages_of(row, tables_, begin, end));
    const int32_t *table = tables_.data() + row * tables_.shape(1);
    for (int64_t position = begin; position < end; ++position)
        places_.push_back(table[position / size] * size + position % size);
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
