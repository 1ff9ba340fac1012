// Layers with a recurrence over states.

#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "bindings.h"
#include "states.h"
#include "tensors.h"

StateMetadata::StateMetadata(const Ints &reads, const Ints &writes, const Ints &query_len) {
    const int64_t rows = query_len.size();
    TORCH_CHECK(
        rows > 0 && reads.ndim() == 1 && reads.size() == rows && query_len.ndim() == 1,
        "a state and a query length a row");
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t count = query_len.data()[row];
        TORCH_CHECK(count > 0, "a row has tokens");
        rows_.push_back(
            {.token = tokens(), .count = count, .read = -1, .writes = nullptr, .several = false});
        token_rows_.insert(token_rows_.end(), count, static_cast<int32_t>(row));
    }
    take(reads.data(), 1, writes, 0);
}

void StateMetadata::advance(const Ints &table) {
    TORCH_CHECK(one_each(), "only rows of one token each go on");
    TORCH_CHECK(table.ndim() == 2 && table.shape(1) > 1, "states to read and to write a row");
    take(table.data(), table.shape(1), table, 1);
}

void StateMetadata::take(const int32_t *reads, int64_t step, const Ints &table, int64_t first) {
    const auto rows = static_cast<int64_t>(rows_.size());
    TORCH_CHECK(table.ndim() == 2 && table.shape(0) == rows, "states to write a row");
    const int64_t columns = table.shape(1), each = columns - first;
    TORCH_CHECK(each > 0, "states to write a row");
    std::vector<int32_t> writes;
    int64_t needed = 0;
    for (int64_t row = 0; row < rows; ++row) {
        const int32_t *own = table.data() + row * columns + first;
        int64_t stored = 0;
        while (stored < each && own[stored] >= 0) ++stored;
        TORCH_CHECK(
            stored == 1 || stored == rows_[row].count, "row ", row, " of ", rows_[row].count,
            " tokens leaves ", stored, " states");
        writes.insert(writes.end(), own, own + each);
        needed = std::max<int64_t>(needed, reads[row * step] + int64_t{1});
        for (int64_t i = 0; i < stored; ++i)
            needed = std::max<int64_t>(needed, own[i] + int64_t{1});
    }
    writes_ = std::move(writes);
    states_needed_ = needed;
    for (int64_t row = 0; row < rows; ++row) {
        StateRow &each_row = rows_[row];
        each_row.read = reads[row * step];
        each_row.writes = writes_.data() + row * each;
        each_row.several = each > 1 && each_row.writes[1] >= 0;
    }
}

StateRows StateMetadata::plain() const {
    return {rows_.data(), static_cast<int64_t>(rows_.size()), token_rows_.data()};
}

RecurrentLayer::RecurrentLayer(
    const Recurrence &sizes, const at::Tensor &conv, const Optional &conv_bias,
    const at::Tensor &decay_log, const at::Tensor &step_bias, const Optional &skip,
    const Optional &scales, const Optional &norm)
    : packed_(sizes) {
    for (const int64_t size :
         {sizes.key_heads, sizes.heads, sizes.rows, sizes.columns, sizes.norm_part})
        TORCH_CHECK(
            0 < size && size <= std::numeric_limits<int32_t>::max(),
            "sizes are positive, and none is ", size);
    TORCH_CHECK(
        1 < sizes.taps && sizes.taps <= CONV_TAPS_MAX, "a convolution has 2 to ", CONV_TAPS_MAX,
        " taps, and not ", sizes.taps);
    TORCH_CHECK(sizes.heads % sizes.key_heads == 0, "heads are shared out evenly");
    TORCH_CHECK(sizes.width() % sizes.norm_part == 0, "a norm has whole parts");
    packed_.dtype = dtype_of(conv);
    packed_.conv = vector_of(conv, conv, sizes.taps * sizes.channels());
    packed_.conv_bias = conv_bias ? vector_of(*conv_bias, conv, sizes.channels()) : nullptr;
    const auto floats = [&](const at::Tensor &tensor) {
        TORCH_CHECK(tensor.scalar_type() == at::kFloat, "numbers of heads are float32");
        return static_cast<const float *>(vector_of(tensor, tensor, sizes.heads));
    };
    packed_.decay_log = floats(decay_log);
    packed_.step_bias = floats(step_bias);
    TORCH_CHECK(
        skip.has_value() == (sizes.kind == RecurrenceKind::ssd), "an ssd has what skips it");
    packed_.skip = skip ? floats(*skip) : nullptr;
    packed_.scales = scales ? vector_of(*scales, conv, sizes.inputs()) : nullptr;
    packed_.norm = nullptr;
    packed_.norm_weights = sizes.norm_part;
    if (norm) {
        packed_.norm_weights = norm->numel();
        TORCH_CHECK(
            packed_.norm_weights == sizes.width() || packed_.norm_weights == sizes.norm_part,
            "a weight for each number of a token, or of a part");
        packed_.norm = vector_of(*norm, conv, packed_.norm_weights);
    }
    for (const at::Tensor &tensor : {conv, decay_log, step_bias}) kept_.push_back(tensor);
    for (const Optional *tensor : {&conv_bias, &skip, &scales, &norm})
        if (*tensor) kept_.push_back(**tensor);
}

void RecurrentLayer::check_states(const at::Tensor &conv_states, const at::Tensor &states) const {
    const Recurrence &layer = packed_;
    TORCH_CHECK(
        conv_states.is_cpu() && conv_states.is_contiguous() &&
            conv_states.scalar_type() == kept_.front().scalar_type() &&
            conv_states.sizes() ==
                at::IntArrayRef({conv_states.size(0), layer.taps - 1, layer.channels()}),
        "states of the convolution are (S, taps - 1, C)");
    TORCH_CHECK(
        states.is_cpu() && states.is_contiguous() && states.scalar_type() == at::kFloat &&
            states.sizes() ==
                at::IntArrayRef({conv_states.size(0), layer.heads, layer.rows, layer.columns}),
        "states are (S, H, rows, columns) float32");
}

at::Tensor RecurrentLayer::forward(
    const at::Tensor &projected, const at::Tensor &conv_states, const at::Tensor &states,
    const StateMetadata &rows) const {
    const at::Tensor inputs = projected.contiguous();
    TORCH_CHECK(
        dtype_of(inputs) == packed_.dtype &&
            inputs.sizes() == at::IntArrayRef({rows.tokens(), packed_.inputs()}),
        "what is projected is (T, inputs)");
    check_states(conv_states, states);
    TORCH_CHECK(
        rows.states_needed() <= states.size(0), "a row has state ", rows.states_needed() - 1,
        " of ", states.size(0));
    at::Tensor out = at::empty({rows.tokens(), packed_.width()}, inputs.options());
    const at::Tensor room =
        at::empty({RecurrenceRoom::size(packed_, rows.tokens())}, at::TensorOptions(at::kFloat));
    const RecurrenceCall call = {
        .layer = &packed_,
        .tokens = rows.tokens(),
        .rows = rows.plain(),
        .projected = inputs.const_data_ptr(),
        .conv_states = conv_states.mutable_data_ptr(),
        .states = states.mutable_data_ptr<float>(),
        .room = RecurrenceRoom::at(room.mutable_data_ptr<float>(), packed_, rows.tokens()),
        .out = out.mutable_data_ptr(),
    };
    const int team = threads();
    const KernelTimer computing;
    kernels().recurrence(call, team);
    return out;
}

void bind_recurrent(py::module_ &module) {
    using Optional = RecurrentLayer::Optional;
    py::class_<StateMetadata, std::shared_ptr<StateMetadata>>(module, "StateMetadata")
        .def(
            py::init<
                const StateMetadata::Ints &, const StateMetadata::Ints &,
                const StateMetadata::Ints &>(),
            py::kw_only(), py::arg("reads"), py::arg("writes"), py::arg("query_len"));
    py::enum_<RecurrenceKind>(module, "RecurrenceKind")
        .value("ssd", RecurrenceKind::ssd)
        .value("gated_delta", RecurrenceKind::gated_delta);
    py::class_<RecurrentLayer>(module, "RecurrentLayer")
        .def(
            py::init([](RecurrenceKind kind, int64_t key_heads, int64_t heads, int64_t rows,
                        int64_t columns, const at::Tensor &conv, const Optional &conv_bias,
                        const at::Tensor &decay_log, const at::Tensor &step_bias,
                        const Optional &skip, const std::pair<double, double> &step_limits,
                        const Optional &scales, const Optional &norm, int64_t norm_part,
                        double norm_eps, bool gate_first) {
                const Recurrence sizes = {
                    .kind = kind,
                    .dtype = Dtype::f32,
                    .key_heads = key_heads,
                    .heads = heads,
                    .rows = rows,
                    .columns = columns,
                    .taps = conv.size(0),
                    .conv = nullptr,
                    .conv_bias = nullptr,
                    .decay_log = nullptr,
                    .step_bias = nullptr,
                    .skip = nullptr,
                    .step_min = static_cast<float>(step_limits.first),
                    .step_max = static_cast<float>(step_limits.second),
                    .scales = nullptr,
                    .norm = nullptr,
                    .norm_part = norm_part,
                    .norm_weights = 0,
                    .norm_eps = static_cast<float>(norm_eps),
                    .gate_first = gate_first,
                };
                return std::make_unique<RecurrentLayer>(
                    sizes, conv, conv_bias, decay_log, step_bias, skip, scales, norm);
            }),
            py::kw_only(), py::arg("kind"), py::arg("key_heads"), py::arg("heads"), py::arg("rows"),
            py::arg("columns"), py::arg("conv"), py::arg("conv_bias"), py::arg("decay_log"),
            py::arg("step_bias"), py::arg("skip"), py::arg("step_limits"), py::arg("scales"),
            py::arg("norm"), py::arg("norm_part"), py::arg("norm_eps"), py::arg("gate_first"))
        .def("forward", &RecurrentLayer::forward);
}
