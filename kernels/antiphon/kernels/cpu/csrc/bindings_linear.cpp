// Packed linears: a Python object holds the tensors, and the plain struct that kernels read.

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "linear.h"
#include "tensors.h"

namespace {

// Of panels: inputs side by side, and their type.
struct Shape {
    int64_t group;
    at::ScalarType type;
};

Shape shape_of(Weights weights) {
    switch (weights) {
        case Weights::bf16: return {2, at::kBFloat16};
        case Weights::f32: return {1, at::kFloat};
        case Weights::int8: return {4, at::kChar};
        default: return {4, at::kByte};
    }
}

// Of panels with halves or without.
int64_t panels_for(int64_t outputs, bool halves) {
    return halves ? (outputs / 2 + 15) / 16 : (outputs + 31) / 32;
}

void check_shape(int64_t inputs, int64_t outputs, bool halves) {
    TORCH_CHECK(inputs > 0 && outputs > 0, "a linear has inputs and outputs");
    TORCH_CHECK(inputs <= 65536, "sums of more products of bytes may leave 32 bits");
    TORCH_CHECK(outputs <= INT32_MAX, "so many outputs have no numbers");
    TORCH_CHECK(!halves || outputs % 2 == 0, "halves are of equal size");
}

void check_of_outputs(
    const std::optional<at::Tensor> &tensor, at::ScalarType wanted, int64_t padded) {
    TORCH_CHECK(
        !tensor ||
            (tensor->is_cpu() && tensor->is_contiguous() && tensor->scalar_type() == wanted &&
             tensor->numel() == padded),
        "scales, sums and bias are padded to whole panels");
}

}  // namespace

HeadLinears::HeadLinears(const std::vector<const Linear *> &linears) {
    TORCH_CHECK(!linears.empty(), "there are heads");
    for (const Linear *linear : linears) {
        TORCH_CHECK(linear != nullptr, "None is no linear");
        linears_.push_back(&linear->packed());
        const PackedLinear &one = *linears_.back(), &first = *linears_.front();
        TORCH_CHECK(
            one.inputs == first.inputs && one.outputs == first.outputs && one.dtype == first.dtype,
            "linears of heads have one shape");
    }
}

at::Tensor HeadLinears::multiply(const at::Tensor &x) const {
    const PackedLinear &linear = *linears_.front();
    const auto heads = static_cast<int64_t>(linears_.size());
    const auto type = linear.dtype == Dtype::bf16 ? at::kBFloat16 : at::kFloat;
    TORCH_CHECK(
        x.is_cpu() && x.dim() == 3 && x.size(1) == heads && x.size(2) == linear.inputs &&
            x.scalar_type() == type,
        "x must be (rows, ", heads, ", ", linear.inputs, ") in ", type, ", got ", x.sizes(), " in ",
        x.scalar_type());
    const at::Tensor rows = x.stride(2) == 1 ? x : x.contiguous();
    at::Tensor y = at::empty({rows.size(0), heads, linear.outputs}, x.options());
    if (rows.size(0) == 0) return y;
    const HeadLinearsCall call = {
        .linears = linears_.data(),
        .heads = heads,
        .rows = rows.size(0),
        .x = rows.const_data_ptr(),
        .x_stride = rows.stride(0),
        .x_head_stride = rows.stride(1),
        .y = y.mutable_data_ptr(),
        .y_stride = heads * linear.outputs,
        .y_head_stride = linear.outputs,
    };
    const int team = threads();
    const KernelTimer computing;
    kernels().head_linears(call, team);
    return y;
}

Linear::Linear(
    Weights weights, Dtype dtype, bool halves, int64_t inputs, int64_t outputs, at::Tensor panels,
    std::optional<at::Tensor> scales, std::optional<at::Tensor> bias)
    : panels_(std::move(panels)), scales_(std::move(scales)), bias_(std::move(bias)) {
    check_shape(inputs, outputs, halves);
    const int64_t padded = panels_for(outputs, halves) * 32;
    const bool int8 = weights == Weights::int8 || weights == Weights::int8_dynamic;
    const Shape shape = shape_of(weights);
    TORCH_CHECK(
        int8 || dtype == (weights == Weights::bf16 ? Dtype::bf16 : Dtype::f32),
        "weights that are not quantized have the number format of activations");
    TORCH_CHECK(
        panels_.is_cpu() && panels_.is_contiguous() && panels_.scalar_type() == shape.type &&
            panels_.numel() == padded * ((inputs + shape.group - 1) / shape.group) * shape.group,
        "panels do not fit the shape");
    check_of_outputs(scales_, at::kFloat, padded);
    check_of_outputs(bias_, at::kFloat, padded);
    TORCH_CHECK(scales_.has_value() == int8, "int8 weights have scales, others have none");
    packed_ = {
        .weights = weights,
        .dtype = dtype,
        .halves = halves,
        .inputs = inputs,
        .outputs = outputs,
        .panels = panels_.const_data_ptr(),
        .scales = scales_ ? scales_->const_data_ptr<float>() : nullptr,
        .bias = bias_ ? bias_->const_data_ptr<float>() : nullptr,
        .grouping = {},
    };
}

Linear::Linear(
    const Grouping &grouping, Dtype dtype, bool halves, int64_t inputs, int64_t outputs,
    at::Tensor panels, std::optional<at::Tensor> values, std::optional<at::Tensor> bias)
    : panels_(std::move(panels)), bias_(std::move(bias)), values_(std::move(values)) {
    check_shape(inputs, outputs, halves);
    const int64_t bits = grouping.bits, count = panels_for(outputs, halves);
    TORCH_CHECK(bits == 4 || bits == 5 || bits == 6 || bits == 8, "no codes have ", bits, " bits");
    TORCH_CHECK(
        grouping.group > 0 && grouping.group % code_unit(bits) == 0 &&
            inputs % code_unit(bits) == 0,
        "groups and inputs are multiples of ", code_unit(bits));
    TORCH_CHECK(
        panels_.is_cpu() && panels_.is_contiguous() && panels_.scalar_type() == at::kByte &&
            panels_.numel() == count * grouped_panel_bytes(grouping, inputs),
        "panels do not fit the shape");
    TORCH_CHECK(
        (bits == 8) == !values_ &&
            (!values_ ||
             (values_->is_cpu() && values_->is_contiguous() &&
              values_->scalar_type() == at::kBFloat16 && values_->numel() == int64_t{1} << bits)),
        "codes of less than 8 bits have values");
    check_of_outputs(bias_, at::kFloat, count * 32);
    packed_ = {
        .weights = Weights::grouped,
        .dtype = dtype,
        .halves = halves,
        .inputs = inputs,
        .outputs = outputs,
        .panels = panels_.const_data_ptr(),
        .scales = nullptr,
        .bias = bias_ ? bias_->const_data_ptr<float>() : nullptr,
        .grouping = grouping,
    };
    if (values_) packed_.grouping.values = static_cast<const uint16_t *>(values_->const_data_ptr());
}

at::Tensor Linear::forward(const at::Tensor &x, Epilogue epilogue) const {
    const auto type = packed_.dtype == Dtype::bf16 ? at::kBFloat16 : at::kFloat;
    TORCH_CHECK(
        x.is_cpu() && x.dim() == 2 && x.size(1) == packed_.inputs && x.scalar_type() == type,
        "x must be (rows, ", packed_.inputs, ") in ", type, ", got ", x.sizes(), " in ",
        x.scalar_type());
    TORCH_CHECK(epilogue != Epilogue::gate || packed_.halves, "a gate is of a linear in halves");
    const at::Tensor rows = x.contiguous();
    const int64_t columns = epilogue == Epilogue::gate ? packed_.outputs / 2 : packed_.outputs;
    const auto kept = epilogue == Epilogue::widen ? at::kFloat : type;
    at::Tensor y = at::empty({rows.size(0), columns}, x.options().dtype(kept));
    if (rows.size(0) > 0) {
        const int team = threads();
        const KernelTimer computing;
        kernels().linear(
            packed_, rows.const_data_ptr(), rows.size(0), y.mutable_data_ptr(), epilogue, team);
    }
    return y;
}

void Linear::write(const at::Tensor &rows, int64_t panel, int64_t lane, int64_t lanes) {
    constexpr int64_t PANEL = 32;
    TORCH_CHECK(packed_.weights != Weights::grouped, "weights in groups are written with scales");
    const Shape shape = shape_of(packed_.weights);
    const int64_t groups = (packed_.inputs + shape.group - 1) / shape.group;
    const int64_t width = scales_ ? packed_.inputs : groups * shape.group;
    TORCH_CHECK(
        rows.is_cpu() && rows.dim() == 2 && rows.size(1) == width && rows.is_contiguous(),
        "rows must be (rows, ", width, ") in one piece, got ", rows.sizes());
    const Dtype dtype = dtype_of(rows);
    TORCH_CHECK(
        scales_ || rows.scalar_type() == shape.type, "rows are laid out as they are: ", shape.type);
    TORCH_CHECK(
        0 <= lane && 0 < lanes && lane + lanes <= PANEL && rows.size(0) % lanes == 0,
        "no panel has lanes ", lane, " to ", lane + lanes);
    const int64_t count = rows.size(0) / lanes;
    const int64_t all = panels_.numel() / PANEL / shape.group / groups;
    TORCH_CHECK(
        0 <= panel && panel + count <= all, "panels ", panel, " to ", panel + count, " of ", all);
    const int64_t bytes = panels_.nbytes() / all, number_bytes = panels_.element_size();
    const PackCall call = {
        .linear = packed_,
        .rows = rows.const_data_ptr(),
        .dtype = dtype,
        .count = count,
        .lanes = lanes,
        .width = width,
        .panels = static_cast<char *>(panels_.mutable_data_ptr()) + panel * bytes +
            lane * shape.group * number_bytes,
        .scales = scales_ ? scales_->mutable_data_ptr<float>() + panel * PANEL + lane : nullptr,
    };
    // Others read meanwhile what comes next: a team that waits for their core is slower than none.
    const int team = std::max(threads() - 1, 1);
    const KernelTimer computing;
    kernels().pack(call, team);
}

// By ScaleDtype.
static constexpr at::ScalarType SCALE_TYPES[] = {at::kHalf, at::kBFloat16, at::kFloat};

void Linear::write_groups(
    const at::Tensor &codes, const at::Tensor &scales, const std::optional<at::Tensor> &minimums,
    int64_t panel, int64_t lane, int64_t lanes) {
    const Grouping &grouping = packed_.grouping;
    TORCH_CHECK(packed_.weights == Weights::grouped, "these weights have no groups");
    const int64_t groups = (packed_.inputs + grouping.group - 1) / grouping.group;
    const auto check = [](const at::Tensor &tensor, at::ScalarType type, int64_t columns) {
        TORCH_CHECK(
            tensor.is_cpu() && tensor.is_contiguous() && tensor.dim() == 2 &&
                tensor.size(1) == columns && tensor.scalar_type() == type,
            "expected (rows, ", columns, ") in ", type, ", got ", tensor.sizes(), " in ",
            tensor.scalar_type());
    };
    check(codes, at::kByte, packed_.inputs);
    TORCH_CHECK(minimums.has_value() == grouping.minimums, "minimums are there, or are not");
    for (const at::Tensor *each : {&scales, minimums ? &*minimums : &scales}) {
        check(*each, SCALE_TYPES[static_cast<int>(grouping.scales)], groups);
        TORCH_CHECK(each->size(0) == codes.size(0), "scales of other rows");
    }
    TORCH_CHECK(
        0 <= lane && 0 < lanes && lane + lanes <= 32 && codes.size(0) % lanes == 0,
        "no panel has lanes ", lane, " to ", lane + lanes);
    const int64_t bytes = grouped_panel_bytes(grouping, packed_.inputs);
    const int64_t count = codes.size(0) / lanes, all = panels_.numel() / bytes;
    TORCH_CHECK(
        0 <= panel && panel + count <= all, "panels ", panel, " to ", panel + count, " of ", all);
    const PackGroupsCall call = {
        .linear = packed_,
        .codes = codes.const_data_ptr<uint8_t>(),
        .scales = scales.const_data_ptr(),
        .minimums = minimums ? minimums->const_data_ptr() : nullptr,
        .count = count,
        .lanes = lanes,
        .panels = static_cast<char *>(panels_.mutable_data_ptr()) + panel * bytes,
        .lane = lane,
    };
    const int team = std::max(threads() - 1, 1);
    const KernelTimer computing;
    kernels().pack_groups(call, team);
}

at::Tensor Linear::rows(const at::Tensor &outputs) const {
    TORCH_CHECK(
        outputs.is_cpu() && outputs.dim() == 1 && outputs.scalar_type() == at::kLong,
        "outputs are (n) int64");
    const at::Tensor ids = outputs.contiguous();
    const auto *data = ids.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < ids.size(0); ++i)
        TORCH_CHECK_INDEX(
            data[i] >= 0 && data[i] < packed_.outputs, "there is no output ", data[i]);
    const auto type = packed_.dtype == Dtype::bf16 ? at::kBFloat16 : at::kFloat;
    at::Tensor y = at::empty({ids.size(0), packed_.inputs}, at::TensorOptions(type));
    const int team = threads();
    const KernelTimer computing;
    kernels().linear_rows(packed_, data, ids.size(0), y.mutable_data_ptr(), team);
    return y;
}

void bind_linear(py::module_ &module) {
    py::enum_<Weights>(module, "Weights")
        .value("bf16", Weights::bf16)
        .value("f32", Weights::f32)
        .value("int8", Weights::int8)
        .value("int8_dynamic", Weights::int8_dynamic);
    py::enum_<Dtype>(module, "Dtype").value("bf16", Dtype::bf16).value("f32", Dtype::f32);
    py::enum_<ScaleDtype>(module, "ScaleDtype")
        .value("f16", ScaleDtype::f16)
        .value("bf16", ScaleDtype::bf16)
        .value("f32", ScaleDtype::f32);
    py::class_<Linear>(module, "Linear")
        .def(
            py::init<
                Weights, Dtype, bool, int64_t, int64_t, at::Tensor, std::optional<at::Tensor>,
                std::optional<at::Tensor>>(),
            py::kw_only(), py::arg("weights"), py::arg("dtype"), py::arg("halves"),
            py::arg("inputs"), py::arg("outputs"), py::arg("panels"), py::arg("scales"),
            py::arg("bias"))
        .def(
            py::init([](int64_t bits, int64_t group, ScaleDtype scale_dtype, bool minimums,
                        Dtype dtype, bool halves, int64_t inputs, int64_t outputs,
                        at::Tensor panels, std::optional<at::Tensor> values,
                        std::optional<at::Tensor> bias) {
                const Grouping grouping = {bits, group, scale_dtype, minimums, nullptr};
                return std::make_unique<Linear>(
                    grouping, dtype, halves, inputs, outputs, std::move(panels), std::move(values),
                    std::move(bias));
            }),
            py::kw_only(), py::arg("bits"), py::arg("group"), py::arg("scale_dtype"),
            py::arg("minimums"), py::arg("dtype"), py::arg("halves"), py::arg("inputs"),
            py::arg("outputs"), py::arg("panels"), py::arg("values"), py::arg("bias"))
        .def(
            "multiply",
            [](const Linear &self, const at::Tensor &x) {
                return self.forward(x, Epilogue::store);
            })
        .def(
            "multiply_wide",
            [](const Linear &self, const at::Tensor &x) {
                return self.forward(x, Epilogue::widen);
            })
        .def(
            "multiply_gated",
            [](const Linear &self, const at::Tensor &x) { return self.forward(x, Epilogue::gate); })
        .def("rows", &Linear::rows)
        .def(
            "write", &Linear::write, py::arg("rows"), py::kw_only(), py::arg("panel"),
            py::arg("lane"), py::arg("lanes"))
        .def(
            "write_groups", &Linear::write_groups, py::arg("codes"), py::arg("scales"),
            py::arg("minimums"), py::kw_only(), py::arg("panel"), py::arg("lane"),
            py::arg("lanes"));
    py::class_<HeadLinears>(module, "HeadLinears")
        .def(
            py::init<const std::vector<const Linear *> &>(), py::arg("linears"),
            py::keep_alive<1, 2>())
        .def("multiply", &HeadLinears::multiply);
}
