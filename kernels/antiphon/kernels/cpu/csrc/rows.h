// The rows of one pass as a cache group sees them; what Python holds.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "paged.h"

class AttentionMetadata {
  public:
    using Ints = pybind11::array_t<int32_t, pybind11::array::c_style>;

    // tables (R, N), query_len and kv_len (R,). Raises if a token that is read or written has no
    // page; -1 may stand for pages that are not read.
    AttentionMetadata(
        int64_t page_tokens, int64_t heads, int64_t queries_per_head, int64_t head_size,
        int64_t window, bool bidirectional, Ints tables, Ints query_len, const Ints &kv_len);

    // The same rows one token further, each of one token, with the tables (R, N) that they have
    // then. Raises as above, and has changed nothing if so.
    void advance(const Ints &tables);

    PagedRows paged() const;
    // The shape of a cache that the rows fit into. Raises if it does not hold their pages.
    CacheShape shape_in(Dtype dtype, CacheFormat format, int64_t pages) const;

    int64_t tokens() const { return static_cast<int64_t>(places_.size()); }
    int64_t pages_needed() const { return pages_needed_; }
    bool one_each() const { return tokens() == rows(); }
    const std::vector<int64_t> &places() const { return places_; }
    const std::vector<AttentionTask> &tasks() const { return tasks_; }
    const std::vector<AttentionMerge> &merges() const { return merges_; }
    // Memory for the segments of shared rows; of one call at a time.
    float *partials() const { return partials_.data(); }

  private:
    int64_t rows() const { return static_cast<int64_t>(kv_len_.size()); }
    void cut();
    int64_t cost(const AttentionTask &task) const;
    struct Segments {
        int64_t first, count;
    };
    Segments segments_of(int64_t position) const;
    void share_out(const AttentionTask &task);
    void place(int64_t row);
    int64_t pages_of(int64_t row, const Ints &tables, int64_t begin, int64_t end) const;

    CacheShape shape_;
    Ints tables_, query_len_;
    std::vector<int32_t> kv_len_;
    int64_t pages_needed_ = 0;
    std::vector<int64_t> places_;
    std::vector<AttentionTask> tasks_;
    std::vector<AttentionMerge> merges_;
    mutable std::vector<float> partials_;
};
