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

// About how long a task takes, in keys.
int64_t cost(const AttentionTask &task) {
    return (task.position + task.queries) * task.queries * task.heads;
}

}  // namespace

Rows::Rows(
    int64_t page_tokens, int64_t heads, int64_t queries_per_head, int64_t head_size, int64_t window,
    Ints tables, Ints query_len, Ints kv_len)
    : shape_{
          .number = Number::f32,
          .kept = Kept::number,
          .pages = 0,
          .page_tokens = page_tokens,
          .heads = heads,
          .queries_per_head = queries_per_head,
          .head_size = head_size,
          .window = window},
      tables_(std::move(tables)),
      query_len_(std::move(query_len)),
      kv_len_(std::move(kv_len)) {
    const int64_t rows = query_len_.size();
    TORCH_CHECK(rows > 0, "a pass has rows");
    for (const int64_t size : {page_tokens, heads, queries_per_head, head_size})
        TORCH_CHECK(0 < size && size <= SIZE_MOST, "sizes are positive, and none is ", size);
    TORCH_CHECK(0 <= window && window <= SIZE_MOST, "no window has ", window, " tokens");
    TORCH_CHECK(head_size % 2 == 0, "the head size is even");
    TORCH_CHECK(
        tables_.ndim() == 2 && tables_.shape(0) == rows && query_len_.ndim() == 1 &&
            kv_len_.ndim() == 1 && kv_len_.size() == rows,
        "a table, a query length and a kv length a row");
    const bool many = rows >= 4 * threads();
    for (int64_t row = 0; row < rows; ++row) {
        cut(row, many ? heads : 1);
        place(row);
    }
    // Long ones first: what is left for the end is short.
    std::stable_sort(tasks_.begin(), tasks_.end(), [](const auto &a, const auto &b) {
        return cost(a) > cost(b);
    });
}

PagedRows Rows::paged() const {
    return {
        .rows = query_len_.size(),
        .stride = tables_.shape(1),
        .tables = tables_.data(),
        .query_len = query_len_.data(),
        .kv_len = kv_len_.data(),
    };
}

CacheShape Rows::shape_in(Number number, Kept kept, int64_t pages) const {
    TORCH_CHECK(pages_needed_ <= pages, "a row has page ", pages_needed_ - 1, " of ", pages);
    CacheShape shape = shape_;
    shape.number = number;
    shape.kept = kept;
    shape.pages = pages;
    return shape;
}

void Rows::cut(int64_t row, int64_t heads_together) {
    const int64_t queries = query_len_.data()[row], end = kv_len_.data()[row];
    TORCH_CHECK(
        0 < queries && queries <= end, "row ", row, " has ", queries, " of ", end, " tokens");
    const int64_t unit = EVEN_QUERIES / std::gcd(EVEN_QUERIES, shape_.queries_per_head);
    const int64_t most =
        std::max<int64_t>(TASK_QUERIES / shape_.queries_per_head / unit, 1) * unit;
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

void Rows::place(int64_t row) {
    const int64_t size = shape_.page_tokens, columns = tables_.shape(1);
    const int64_t end = kv_len_.data()[row], begin = end - query_len_.data()[row];
    const int64_t first = shape_.window ? std::max<int64_t>(begin + 1 - shape_.window, 0) : 0;
    const int32_t *table = tables_.data() + row * columns;
    for (int64_t page = first / size; page <= (end - 1) / size; ++page) {
        TORCH_CHECK(
            page < columns && table[page] >= 0, "row ", row,
            " reads or writes a token that has no page");
        pages_needed_ = std::max(pages_needed_, int64_t{table[page]} + 1);
    }
    for (int64_t position = begin; position < end; ++position)
        places_.push_back(table[position / size] * size + position % size);
}
