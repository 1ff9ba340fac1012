// What a tensor is to the kernels.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

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

// Keys and values (P, S, H, D) of one layer, and their scales.
inline LayerCache layer_of(
    const at::Tensor &keys, const at::Tensor &values, double key_scale, double value_scale) {
    TORCH_CHECK(keys.dim() == 4 && keys.sizes() == values.sizes(), "a cache is (P, S, H, D)");
    TORCH_CHECK(keys.is_contiguous() && values.is_contiguous(), "a cache lies in one piece");
    TORCH_CHECK(keys.scalar_type() == values.scalar_type(), "keys and values have one dtype");
    TORCH_CHECK(key_scale > 0 && value_scale > 0, "scales are positive");
    return {
        keys.mutable_data_ptr(), values.mutable_data_ptr(), static_cast<float>(key_scale),
        static_cast<float>(value_scale)};
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
