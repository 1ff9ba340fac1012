// What a tensor is to the kernels.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "kv_layout.h"
#include "packed.h"
#include "paged.h"

// Of a tensor in this machine's memory, which is all that a kernel can read.
inline Dtype dtype_of(const at::Tensor &tensor) {
    const auto type = tensor.scalar_type();
    TORCH_CHECK(tensor.is_cpu(), "no kernel for memory of ", tensor.device());
    TORCH_CHECK(type == at::kBFloat16 || type == at::kFloat, "no kernel for ", type);
    return type == at::kBFloat16 ? Dtype::bf16 : Dtype::f32;
}

// What a cache keeps, of a model that computes in the number format of `like`.
inline CacheFormat cache_format_of(const at::Tensor &cache, const at::Tensor &like) {
    const auto type = cache.scalar_type();
    TORCH_CHECK(cache.is_cpu(), "no kernel for memory of ", cache.device());
    if (type == at::kFloat8_e4m3fn) return CacheFormat::e4m3;
    if (type == at::kFloat8_e5m2) return CacheFormat::e5m2;
    TORCH_CHECK(
        dtype_of(cache) == dtype_of(like),
        "a cache is of the dtype that the model computes in, or in eight bits");
    return CacheFormat::model;
}

// Whether what a page has of a head lies in one piece, whose numbers are no other's.
inline bool heads_lie_whole(const at::Tensor &pages) {
    const int64_t numbers = pages.size(2) * pages.size(3) * pages.size(4);
    return pages.stride(4) == 1 && pages.stride(3) == pages.size(4) &&
        pages.stride(2) == pages.size(3) * pages.size(4) && pages.stride(1) >= numbers &&
        pages.stride(0) >= pages.size(1) * numbers;
}

// Keys and values of one layer (kv_layout.h), and their scales; latents are both in one tensor.
inline LayerCache layer_of(
    const at::Tensor &keys, const at::Tensor &values, double key_scale, double value_scale) {
    const bool latents = values.is_same(keys);
    TORCH_CHECK(
        keys.dim() == 5 && values.dim() == 5 && keys.numel() == values.numel(),
        "keys are (P, H, D / W, S, W), and values (P, H, S / W, D, W)");
    TORCH_CHECK(
        heads_lie_whole(keys) && heads_lie_whole(values), "a head of a page lies in one piece");
    TORCH_CHECK(
        keys.stride(0) == values.stride(0) && keys.stride(1) == values.stride(1),
        "pages and heads of keys are as far apart as those of values");
    TORCH_CHECK(keys.scalar_type() == values.scalar_type(), "keys and values have one dtype");
    TORCH_CHECK(key_scale > 0 && value_scale > 0, "scales are positive");
    return {
        keys.mutable_data_ptr(),
        latents ? nullptr : values.mutable_data_ptr(),
        static_cast<float>(key_scale),
        static_cast<float>(value_scale),
        keys.stride(0),
        keys.stride(1)};
}

// The shape of such a cache, of a model that computes in the dtype of `like`; rows know the rest.
inline CacheShape cache_shape_of(
    const at::Tensor &keys, const at::Tensor &values, const at::Tensor &like) {
    const CacheShape shape = {
        .dtype = dtype_of(like),
        .format = cache_format_of(keys, like),
        .pages = keys.size(0),
        .page_tokens = keys.size(3),
        .heads = keys.size(1),
        .queries_per_head = 0,
        .head_size = keys.size(2) * keys.size(4),
        .window = 0,
    };
    const KvLayout layout(shape);
    TORCH_CHECK(keys.numel() > 0, "a cache has room");
    TORCH_CHECK(
        keys.size(4) == layout.word && layout.tokens == shape.page_tokens,
        "the words of a cache are those of another dtype");
    TORCH_CHECK(
        values.is_same(keys) ||
            values.sizes() ==
                at::IntArrayRef(
                    {shape.pages, shape.heads, layout.tokens / layout.word, shape.head_size,
                     layout.word}),
        "values are (P, H, S / W, D, W)");
    return shape;
}

// Whether rows, which know how many tokens a page has, fit a cache of this shape.
inline bool fits(const CacheShape &rows, const CacheShape &cache) {
    return KvLayout(rows).tokens == cache.page_tokens && rows.heads == cache.heads &&
        rows.head_size == cache.head_size;
}

// The address of `size` values in the number format of `like`.
inline const void *vector_of(const at::Tensor &tensor, const at::Tensor &like, int64_t size) {
    TORCH_CHECK(
        tensor.is_cpu() && tensor.is_contiguous() && tensor.numel() == size &&
            tensor.scalar_type() == like.scalar_type(),
        "expected ", size, " of ", like.scalar_type(), " in one piece, got ", tensor.sizes(),
        " of ", tensor.scalar_type());
    return tensor.const_data_ptr();
}

// The weight of a norm of numbers in the format of `like`: of a wide one it is in float32.
inline const void *norm_weight(
    NormKind kind, const at::Tensor &weight, const at::Tensor &like, int64_t size) {
    const bool wide = kind == NormKind::rms_wide;
    TORCH_CHECK(
        !wide || weight.scalar_type() == at::kFloat, "the weight of a wide norm is float32");
    return vector_of(weight, wide ? weight : like, size);
}

// Weight and bias of a norm.
using NormTensors = std::pair<at::Tensor, std::optional<at::Tensor>>;

inline constexpr QkNorms NO_QK_NORMS = {
    .kind = NormKind::none,
    .over_token = false,
    .query = nullptr,
    .query_bias = nullptr,
    .key = nullptr,
    .key_bias = nullptr,
    .eps = 0.0f,
};

// The norms of queries and keys; what Python holds.
class QkNormTensors {
  public:
    QkNormTensors(NormKind kind, bool over_token, NormTensors query, NormTensors key, double eps)
        : kind_(kind),
          over_token_(over_token),
          query_(std::move(query)),
          key_(std::move(key)),
          eps_(static_cast<float>(eps)) {}

    // Of so many heads in the number format of `like`; valid while this lives.
    QkNorms plain(const at::Tensor &like, int64_t queries, int64_t keys, int64_t head_size) const {
        const int64_t query_size = (over_token_ ? queries : 1) * head_size;
        const int64_t key_size = (over_token_ ? keys : 1) * head_size;
        return {
            .kind = kind_,
            .over_token = over_token_,
            .query = norm_weight(kind_, query_.first, like, query_size),
            .query_bias = bias_of(query_, like, query_size),
            .key = norm_weight(kind_, key_.first, like, key_size),
            .key_bias = bias_of(key_, like, key_size),
            .eps = eps_,
        };
    }

  private:
    const void *bias_of(const NormTensors &norm, const at::Tensor &like, int64_t size) const {
        if (!norm.second) return nullptr;
        TORCH_CHECK(kind_ == NormKind::layer, "a norm by root-mean-square has no bias");
        return vector_of(*norm.second, like, size);
    }

    NormKind kind_;
    bool over_token_;
    NormTensors query_, key_;
    float eps_;
};

// How many numbers of each head are rotated: the last dimension of a table of cosines.
inline int64_t rotated_of(const at::Tensor &cos, int64_t head_size) {
    const int64_t rotated = cos.size(-1);
    TORCH_CHECK(
        rotated % 2 == 0 && rotated <= head_size, "pairs of a head of ", head_size,
        " are rotated, not ", rotated, " numbers");
    return rotated;
}

inline bool all_true(const at::Tensor &flags) {
    const bool *data = flags.const_data_ptr<bool>();
    return std::all_of(data, data + flags.numel(), [](bool flag) { return flag; });
}
