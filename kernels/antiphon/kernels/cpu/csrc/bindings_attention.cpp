// Attention over the paged cache, and the small operations around it.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <memory>
#include <optional>
#include <utility>

#include "bindings.h"
#include "rows.h"
#include "tensors.h"

namespace {

using Optional = std::optional<at::Tensor>;

// How work is shared out follows from the size of a row, by division.
void check_rows(const at::Tensor &x) {
    TORCH_CHECK(
        x.is_cpu() && x.dim() == 2 && x.size(1) > 0, "x is (rows, size), of at least a number");
}

at::Tensor rmsnorm(const at::Tensor &x, const at::Tensor &weight, double eps) {
    const at::Tensor rows = x.contiguous();
    check_rows(rows);
    at::Tensor out = at::empty_like(rows);
    const NormCall call = {
        .kind = NormKind::rms,
        .dtype = dtype_of(rows),
        .rows = rows.size(0),
        .size = rows.size(1),
        .x = rows.const_data_ptr(),
        .residual = nullptr,
        .weight = vector_of(weight, rows, rows.size(1)),
        .bias = nullptr,
        .eps = static_cast<float>(eps),
        .total = nullptr,
        .out = out.mutable_data_ptr(),
        .finite = nullptr,
    };
    const int team = threads();
    const KernelTimer computing;
    kernels().norm(call, team);
    return out;
}

std::pair<at::Tensor, at::Tensor> add_rmsnorm(
    const at::Tensor &x, const at::Tensor &residual, const at::Tensor &weight, double eps) {
    const at::Tensor rows = x.contiguous(), stream = residual.contiguous();
    check_rows(rows);
    TORCH_CHECK(
        stream.is_cpu() && stream.sizes() == rows.sizes(), "x and residual are (rows, size)");
    TORCH_CHECK(stream.scalar_type() == rows.scalar_type(), "x and residual have one dtype");
    at::Tensor out = at::empty_like(rows), total = at::empty_like(rows);
    const NormCall call = {
        .kind = NormKind::rms,
        .dtype = dtype_of(rows),
        .rows = rows.size(0),
        .size = rows.size(1),
        .x = rows.const_data_ptr(),
        .residual = stream.const_data_ptr(),
        .weight = vector_of(weight, rows, rows.size(1)),
        .bias = nullptr,
        .eps = static_cast<float>(eps),
        .total = total.mutable_data_ptr(),
        .out = out.mutable_data_ptr(),
        .finite = nullptr,
    };
    const int team = threads();
    {
        const KernelTimer computing;
        kernels().norm(call, team);
    }
    return {out, total};
}

// x (..., size) of any shape; weight and bias (size,), or none.
at::Tensor norm_of(
    NormKind kind, const at::Tensor &x, const Optional &weight, const Optional &bias, double eps) {
    const at::Tensor rows = x.contiguous();
    const Dtype dtype = dtype_of(rows);
    TORCH_CHECK(rows.dim() > 0 && rows.size(-1) > 0, "x is (..., size), of at least a number");
    const int64_t size = rows.size(-1);
    at::Tensor out = at::empty_like(rows);
    const NormCall call = {
        .kind = kind,
        .dtype = dtype,
        .rows = rows.numel() / size,
        .size = size,
        .x = rows.const_data_ptr(),
        .residual = nullptr,
        .weight = weight ? norm_weight(kind, *weight, rows, size) : nullptr,
        .bias = bias ? vector_of(*bias, rows, size) : nullptr,
        .eps = static_cast<float>(eps),
        .total = nullptr,
        .out = out.mutable_data_ptr(),
        .finite = nullptr,
    };
    const int team = threads();
    const KernelTimer computing;
    kernels().norm(call, team);
    return out;
}

at::Tensor rmsnorm_wide(const at::Tensor &x, const at::Tensor &weight, double eps) {
    return norm_of(NormKind::rms_wide, x, weight, std::nullopt, eps);
}

at::Tensor layernorm(
    const at::Tensor &x, const Optional &weight, const Optional &bias, double eps) {
    return norm_of(NormKind::layer, x, weight, bias, eps);
}

// x (T, Q, D) times the sigmoids of gates, whose tokens may lie further apart.
at::Tensor sigmoid_mul(const at::Tensor &x, const at::Tensor &gate) {
    const at::Tensor rows = x.contiguous();
    TORCH_CHECK(rows.dim() == 3 && gate.sizes() == rows.sizes(), "x and gate are (T, Q, D)");
    TORCH_CHECK(
        gate.is_cpu() && gate.scalar_type() == rows.scalar_type() && gate.stride(2) == 1 &&
            gate.stride(1) == gate.size(2) && gate.stride(0) >= 0,
        "the gates of a token lie in one piece");
    const int64_t size = rows.size(1) * rows.size(2);
    TORCH_CHECK(size > 0, "a token has heads");
    at::Tensor out = at::empty_like(rows);
    const int team = threads();
    const KernelTimer computing;
    kernels().sigmoid_mul(
        dtype_of(rows), rows.const_data_ptr(), gate.const_data_ptr(), gate.stride(0), rows.size(0),
        size, out.mutable_data_ptr(), team);
    return out;
}

// softcap * tanh(x / softcap), of floats of any shape.
at::Tensor soft_capped(const at::Tensor &x, double softcap) {
    at::Tensor capped = x.contiguous().clone();
    TORCH_CHECK(dtype_of(capped) == Dtype::f32, "x is of float32");
    const int team = threads();
    const KernelTimer computing;
    kernels().cap(
        capped.mutable_data_ptr<float>(), capped.numel(), static_cast<float>(softcap), team);
    return capped;
}

at::Tensor activate(const at::Tensor &x, Activation activation) {
    TORCH_CHECK(activation != Activation::clamped_swish, "a clamped swish needs gate and up");
    const at::Tensor all = x.contiguous();
    const Dtype dtype = dtype_of(all);
    at::Tensor out = at::empty_like(all);
    const int team = threads();
    const KernelTimer computing;
    kernels().activate(
        dtype, activation, all.const_data_ptr(), all.numel(), out.mutable_data_ptr(), team);
    return out;
}

at::Tensor gate(const at::Tensor &gate_up, Activation activation) {
    TORCH_CHECK(activation != Activation::clamped_swish, "a clamped swish is of experts");
    const at::Tensor rows = gate_up.contiguous();
    check_rows(rows);
    TORCH_CHECK(rows.size(1) % 2 == 0, "gate_up is (rows, 2 * width)");
    const Dtype dtype = dtype_of(rows);
    const int64_t width = rows.size(1) / 2;
    at::Tensor out = at::empty({rows.size(0), width}, rows.options());
    const int team = threads();
    const KernelTimer computing;
    kernels().gate(
        dtype, activation, rows.const_data_ptr(), rows.size(0), width, out.mutable_data_ptr(),
        team);
    return out;
}

at::Tensor silu_mul(const at::Tensor &gate_up) { return gate(gate_up, Activation::silu); }

// Which rows are finite, (rows,) bool; none: all.
Optional finite_rows(const at::Tensor &x) {
    const at::Tensor rows = x.contiguous();
    check_rows(rows);
    const Dtype dtype = dtype_of(rows);
    at::Tensor finite = at::empty({rows.size(0)}, rows.options().dtype(at::kBool));
    auto *flags = finite.mutable_data_ptr<bool>();
    const int team = threads();
    {
        const KernelTimer computing;
        kernels().finite(dtype, rows.const_data_ptr(), rows.size(0), rows.size(1), flags, team);
    }
    if (all_true(finite)) return std::nullopt;
    return finite;
}

at::Tensor argmax(const at::Tensor &x) {
    const at::Tensor rows = x.contiguous();
    check_rows(rows);
    TORCH_CHECK(rows.scalar_type() == at::kFloat, "x is (rows, size) float32");
    at::Tensor found = at::empty({rows.size(0)}, rows.options().dtype(at::kLong));
    const int team = threads();
    const KernelTimer computing;
    kernels().argmax(
        rows.const_data_ptr<float>(), rows.size(0), rows.size(1), found.mutable_data_ptr<int64_t>(),
        team);
    return found;
}

using Scales = std::pair<double, double>;  // of keys and of values

at::Tensor qk_norm_rope_store(
    const at::Tensor &heads, const at::Tensor &cos, const at::Tensor &sin, const at::Tensor &keys,
    const at::Tensor &values, const at::Tensor &places, const std::optional<QkNormTensors> &norms,
    const Scales &scales) {
    const at::Tensor all = heads.contiguous();
    const LayerCache cache = layer_of(keys, values, scales.first, scales.second);
    CacheShape shape = cache_shape_of(keys, values, all);
    TORCH_CHECK(all.dim() == 3 && all.size(2) == shape.head_size, "heads are (T, G * H + 2 H, D)");
    const int64_t tokens = all.size(0), queries = all.size(1) - 2 * shape.heads;
    TORCH_CHECK(queries > 0 && queries % shape.heads == 0, "query heads are shared out evenly");
    const int64_t rotated = rotated_of(cos, shape.head_size);
    shape.queries_per_head = queries / shape.heads;
    TORCH_CHECK(
        places.is_cpu() && places.scalar_type() == at::kLong && places.is_contiguous() &&
            places.numel() == tokens,
        "places are (T,) int64");
    const auto *place = places.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < tokens; ++i)
        TORCH_CHECK_INDEX(
            0 <= place[i] && place[i] < shape.pages * shape.page_tokens, "no place ", place[i]);
    at::Tensor q = at::empty({tokens, queries, shape.head_size}, all.options());
    const QkNormRopeCall call = {
        .shape = shape,
        .cache = cache,
        .places = place,
        .heads = all.const_data_ptr(),
        .heads_stride = all.size(1) * shape.head_size,
        .cos = vector_of(cos, all, tokens * rotated),
        .sin = vector_of(sin, all, tokens * rotated),
        .rotated = rotated,
        .positions = nullptr,
        .query_scale = nullptr,
        .norms = norms ? norms->plain(all, queries, shape.heads, shape.head_size) : NO_QK_NORMS,
        .q = q.mutable_data_ptr(),
        .q_stride = queries * shape.head_size,
    };
    const int team = threads();
    const KernelTimer computing;
    kernels().qk_norm_rope_store(call, tokens, team);
    return q;
}

at::Tensor paged_attention(
    const at::Tensor &q, const at::Tensor &keys, const at::Tensor &values,
    const AttentionMetadata &rows, double scale, const Scales &scales,
    std::optional<double> softcap, const Optional &sinks) {
    const at::Tensor queries = q.contiguous();
    const LayerCache cache = layer_of(keys, values, scales.first, scales.second);
    const CacheShape found = cache_shape_of(keys, values, queries);
    const CacheShape shape = rows.shape_in(found.dtype, found.format, found.pages);
    TORCH_CHECK(fits(shape, found), "the cache has another shape than the rows");
    const int64_t query_heads = shape.heads * shape.queries_per_head;
    TORCH_CHECK(
        queries.sizes() == at::IntArrayRef({rows.tokens(), query_heads, shape.head_size}),
        "q is (T, G * H, D)");
    TORCH_CHECK(!softcap || *softcap > 0.0, "a cap is positive, and not ", *softcap);
    at::Tensor out = at::empty_like(queries);
    const AttentionCall call = {
        .shape = shape,
        .rows = rows.paged(),
        .cache = cache,
        .scale = static_cast<float>(scale),
        .q = queries.const_data_ptr(),
        .q_stride = query_heads * shape.head_size,
        .out = out.mutable_data_ptr(),
        .partials = rows.partials(),
        .softcap = static_cast<float>(softcap.value_or(0.0)),
        .sinks = sinks ? vector_of(*sinks, queries, query_heads) : nullptr,
    };
    const auto &tasks = rows.tasks();
    const auto &merges = rows.merges();
    const int team = threads();
    const KernelTimer computing;
    kernels().attention(
        call, tasks.data(), static_cast<int64_t>(tasks.size()), merges.data(),
        static_cast<int64_t>(merges.size()), team);
    return out;
}

}  // namespace

void bind_attention(py::module_ &module) {
    // A stack keeps the rows of its last pass.
    py::class_<AttentionMetadata, std::shared_ptr<AttentionMetadata>>(module, "AttentionMetadata")
        .def(
            py::init<
                int64_t, int64_t, int64_t, int64_t, int64_t, bool, AttentionMetadata::Ints,
                AttentionMetadata::Ints, const AttentionMetadata::Ints &>(),
            py::kw_only(), py::arg("page_tokens"), py::arg("heads"), py::arg("queries_per_head"),
            py::arg("head_size"), py::arg("window"), py::arg("bidirectional"), py::arg("tables"),
            py::arg("query_len"), py::arg("kv_len"));
    module.def("rmsnorm", rmsnorm);
    module.def("add_rmsnorm", add_rmsnorm);
    module.def("rmsnorm_wide", rmsnorm_wide);
    module.def("layernorm", layernorm);
    module.def("sigmoid_mul", sigmoid_mul);
    module.def("soft_capped", soft_capped);
    py::enum_<NormKind>(module, "NormKind")
        .value("rms", NormKind::rms)
        .value("rms_wide", NormKind::rms_wide)
        .value("layer", NormKind::layer);
    py::class_<QkNormTensors>(module, "QkNorms")
        .def(
            py::init<NormKind, bool, NormTensors, NormTensors, double>(), py::kw_only(),
            py::arg("kind"), py::arg("over_token"), py::arg("query"), py::arg("key"),
            py::arg("eps"));
    py::enum_<Activation>(module, "Activation")
        .value("silu", Activation::silu)
        .value("gelu", Activation::gelu)
        .value("gelu_tanh", Activation::gelu_tanh)
        .value("quick_gelu", Activation::quick_gelu)
        .value("relu", Activation::relu)
        .value("relu_squared", Activation::relu_squared)
        .value("tanh", Activation::tanh)
        .value("clamped_swish", Activation::clamped_swish);
    module.def("activate", activate);
    module.def("gate", gate);
    module.def("silu_mul", silu_mul);
    module.def("finite_rows", finite_rows);
    module.def("argmax", argmax);
    module.def("qk_norm_rope_store", qk_norm_rope_store);
    module.def(
        "paged_attention", paged_attention, py::arg("q"), py::arg("keys"), py::arg("values"),
        py::arg("rows"), py::arg("scale"), py::arg("scales"), py::arg("softcap") = std::nullopt,
        py::arg("sinks") = std::nullopt);
}
