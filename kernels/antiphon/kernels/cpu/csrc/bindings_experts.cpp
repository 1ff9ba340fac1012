// Mixtures of experts: a Python object holds what the plain struct points to.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "mixture.h"
#include "tensors.h"

namespace {

void check(const PackedLinear &linear, Dtype dtype, int64_t inputs, int64_t outputs) {
    TORCH_CHECK(
        linear.inputs == inputs && linear.outputs == outputs && linear.dtype == dtype,
        "a linear of ", linear.inputs, " to ", linear.outputs, " where one of ", inputs, " to ",
        outputs, " belongs");
}

PackedExpert expert_of(
    const Linear &gate_up, const Linear &down, Dtype dtype, int64_t hidden, int64_t width) {
    check(gate_up.packed(), dtype, hidden, 2 * width);
    check(down.packed(), dtype, width, hidden);
    TORCH_CHECK(gate_up.packed().halves, "gate and up are packed in halves");
    return {gate_up.packed(), down.packed()};
}

// Memory of this thread that stays for the next call.
char *scratch(int64_t bytes) {
    static thread_local at::Tensor memory;
    if (!memory.defined() || memory.numel() < bytes)
        memory = at::empty({bytes}, at::TensorOptions(at::kByte));
    return static_cast<char *>(memory.mutable_data_ptr());
}

}  // namespace

MixtureOfExperts::MixtureOfExperts(
    const Linears &linears, int64_t first, const Routing &routing,
    std::optional<at::Tensor> correction, Activation activation, float alpha, float limit,
    bool share_on_input)
    : correction_(std::move(correction)), shared_{}, packed_{} {
    const auto held = static_cast<int64_t>(linears.gate_up.size());
    const int64_t count = linears.router->packed().outputs;
    TORCH_CHECK(
        held > 0 && linears.down.size() == linears.gate_up.size(), "an expert has two linears");
    TORCH_CHECK(
        0 <= first && first + held <= count, "there are ", count, " experts, not ", held, " from ",
        first, " on");
    for (const auto &part : {linears.gate_up, linears.down})
        for (const Linear *linear : part) TORCH_CHECK(linear != nullptr, "None is no linear");
    TORCH_CHECK(
        routing.groups > 0 && count % routing.groups == 0 && 0 < routing.groups_kept &&
            routing.groups_kept <= routing.groups && 0 < routing.group_best &&
            routing.group_best <= count / routing.groups && 0 < routing.top_k &&
            routing.top_k <= count / routing.groups * routing.groups_kept,
        "no ", routing.top_k, " of ", count, " experts can be chosen");
    const PackedLinear &down = linears.down.front()->packed();
    const int64_t hidden = down.outputs, width = down.inputs;
    check(linears.router->packed(), Dtype::f32, hidden, count);
    for (size_t i = 0; i < linears.down.size(); ++i)
        experts_.push_back(
            expert_of(*linears.gate_up[i], *linears.down[i], down.dtype, hidden, width));
    TORCH_CHECK(
        (linears.shared_gate_up != nullptr) == (linears.shared_down != nullptr) &&
            (linears.shared_gate == nullptr || linears.shared_down != nullptr),
        "a shared expert has two linears, and may have a gate");
    if (linears.shared_down != nullptr)
        shared_ = expert_of(
            *linears.shared_gate_up, *linears.shared_down, down.dtype, hidden,
            linears.shared_down->packed().inputs);
    if (linears.shared_gate != nullptr) check(linears.shared_gate->packed(), down.dtype, hidden, 1);
    if (correction_)
        TORCH_CHECK(
            correction_->is_cpu() && correction_->is_contiguous() &&
                correction_->numel() == count && correction_->scalar_type() == at::kFloat,
            "the correction is (E,) float32");
    packed_ = {
        .dtype = down.dtype,
        .hidden = hidden,
        .width = width,
        .count = count,
        .first = first,
        .held = held,
        .routing = routing,
        .router = linears.router->packed(),
        .correction = correction_ ? correction_->const_data_ptr<float>() : nullptr,
        .experts = experts_.data(),
        .activation = activation,
        .alpha = alpha,
        .limit = limit,
        .share_on_input = share_on_input,
        .shared = linears.shared_down != nullptr ? &shared_ : nullptr,
        .shared_gate = linears.shared_gate != nullptr ? &linears.shared_gate->packed() : nullptr,
    };
}

at::Tensor MixtureOfExperts::forward(const at::Tensor &x) const {
    const auto type = packed_.dtype == Dtype::bf16 ? at::kBFloat16 : at::kFloat;
    TORCH_CHECK(
        x.is_cpu() && x.dim() == 2 && x.size(1) == packed_.hidden && x.scalar_type() == type,
        "x must be (rows, ", packed_.hidden, ") in ", type, ", got ", x.sizes(), " in ",
        x.scalar_type());
    const at::Tensor rows = x.contiguous();
    at::Tensor out = at::empty_like(rows);
    const int64_t tokens = rows.size(0);
    if (tokens == 0) return out;
    ExpertsPlan plan{};
    const ExpertsCall call = {
        .experts = &packed_,
        .tokens = tokens,
        .x = rows.const_data_ptr(),
        .out = out.mutable_data_ptr(),
        .room = room_at(scratch(room_bytes(tokens)), tokens),
        .plan = &plan,
    };
    const int team = threads();
    const KernelTimer computing;
    kernels().experts(call, team);
    return out;
}

int64_t MixtureOfExperts::room_bytes(int64_t tokens) const {
    ExpertsRoom room{};
    return lay_out(room, tokens, [](int64_t) -> char * { return nullptr; });
}

ExpertsRoom MixtureOfExperts::room_at(char *memory, int64_t tokens) const {
    ExpertsRoom room{};
    lay_out(room, tokens, [&](int64_t offset) { return memory + offset; });
    return room;
}

// Give each part its place, and return the size of all.
template <class Part>
int64_t MixtureOfExperts::lay_out(ExpertsRoom &room, int64_t tokens, Part &&part) const {
    int64_t total = 0;
    const auto place = [&](auto &pointer, int64_t bytes) {
        using Pointer = std::remove_reference_t<decltype(pointer)>;
        pointer = reinterpret_cast<Pointer>(part(total));
        total += (bytes + 63) / 64 * 64;
    };
    const int64_t number = packed_.dtype == Dtype::bf16 ? 2 : 4;
    const int64_t pairs = tokens * packed_.routing.top_k, hidden = packed_.hidden;
    place(room.logits, tokens * packed_.count * sizeof(float));
    place(room.chosen, pairs * sizeof(int32_t));
    place(room.shares, pairs * sizeof(float));
    place(room.row_of_pair, pairs * sizeof(int32_t));
    place(room.pair_of_row, pairs * sizeof(int32_t));
    place(room.bounds, (packed_.count + 1) * sizeof(int32_t));
    place(room.gated, pairs * packed_.width * number);
    place(room.made, pairs * hidden * number);
    if (packed_.shared != nullptr) {
        place(room.shared_gated, tokens * packed_.shared->down.inputs * number);
        place(room.shared_made, tokens * hidden * number);
    }
    if (packed_.shared_gate != nullptr) place(room.shared_scale, tokens * number);
    place(room.jobs, 2 * (packed_.count + 2) * sizeof(ExpertJob));
    return total;
}

namespace {

std::unique_ptr<MixtureOfExperts> made(
    const Linear &router, int64_t first, std::vector<const Linear *> gate_up,
    std::vector<const Linear *> down, const Linear *shared_gate_up, const Linear *shared_down,
    const Linear *shared_gate, int64_t top_k, bool sigmoid, bool renormalised, double factor,
    int64_t groups, int64_t groups_kept, int64_t group_best, std::optional<at::Tensor> correction,
    Activation activation, double alpha, double limit, bool share_on_input) {
    const MixtureOfExperts::Linears linears = {
        .router = &router,
        .gate_up = std::move(gate_up),
        .down = std::move(down),
        .shared_gate_up = shared_gate_up,
        .shared_down = shared_down,
        .shared_gate = shared_gate,
    };
    const Routing routing = {
        .top_k = top_k,
        .sigmoid = sigmoid,
        .renormalised = renormalised,
        .factor = static_cast<float>(factor),
        .groups = groups,
        .groups_kept = groups_kept,
        .group_best = group_best,
    };
    return std::make_unique<MixtureOfExperts>(
        linears, first, routing, std::move(correction), activation, static_cast<float>(alpha),
        static_cast<float>(limit), share_on_input);
}

}  // namespace

void bind_experts(py::module_ &module) {
    py::class_<MixtureOfExperts>(module, "MixtureOfExperts")
        .def(
            py::init(&made), py::kw_only(), py::arg("router"), py::arg("first"), py::arg("gate_up"),
            py::arg("down"), py::arg("shared_gate_up"), py::arg("shared_down"),
            py::arg("shared_gate"), py::arg("top_k"), py::arg("sigmoid"), py::arg("renormalised"),
            py::arg("factor"), py::arg("groups"), py::arg("groups_kept"), py::arg("group_best"),
            py::arg("correction"), py::arg("activation"), py::arg("alpha"), py::arg("limit"),
            py::arg("share_on_input"), py::keep_alive<1, 2>(), py::keep_alive<1, 4>(),
            py::keep_alive<1, 5>(), py::keep_alive<1, 6>(), py::keep_alive<1, 7>(),
            py::keep_alive<1, 8>())
        .def("forward", &MixtureOfExperts::forward);
}
