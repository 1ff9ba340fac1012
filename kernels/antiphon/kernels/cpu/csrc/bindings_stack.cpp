// All layers of a decoder as one call a step.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "linear.h"
#include "rows.h"
#include "tensors.h"

namespace {

using Optional = std::optional<at::Tensor>;
using Ints = Rows::Ints;

class Stack {
  public:
    Stack(at::Tensor final_norm, double eps, double scale)
        : final_norm_(std::move(final_norm)),
          hidden_(final_norm_.numel()),
          eps_(static_cast<float>(eps)),
          scale_(static_cast<float>(scale)) {
        number_of(final_norm_);
        TORCH_CHECK(
            hidden_ > 0 && final_norm_.is_contiguous(), "the final norm is (hidden,) in one piece");
    }

    // The linears must live as long as the stack.
    void add(
        const Linear &qkv, const Linear &out, const Linear &gate_up, const Linear &down,
        const at::Tensor &attention_norm, const at::Tensor &mlp_norm, const Optional &query_norm,
        const Optional &key_norm, int64_t group, const at::Tensor &keys, const at::Tensor &values,
        const std::pair<double, double> &scales) {
        const LayerCache cache = layer_of(keys, values, scales.first, scales.second);
        kept_of(keys, final_norm_);
        const int64_t size = keys.size(3);
        const PackedLinear &first = qkv.packed(), &last = down.packed();
        check_linear(first, hidden_, first.outputs);
        check_linear(out.packed(), first.outputs - 2 * keys.size(2) * size, hidden_);
        check_linear(gate_up.packed(), hidden_, 2 * last.inputs);
        check_linear(last, last.inputs, hidden_);
        TORCH_CHECK(gate_up.packed().halves, "gate and up are packed in halves");
        TORCH_CHECK(group >= 0, "a layer is of a cache group");
        TORCH_CHECK(query_norm.has_value() == key_norm.has_value(), "both norms or none");
        layers_.push_back({
            .qkv = first,
            .out = out.packed(),
            .gate_up = gate_up.packed(),
            .down = last,
            .attention_norm = vector_of(attention_norm, final_norm_, hidden_),
            .mlp_norm = vector_of(mlp_norm, final_norm_, hidden_),
            .query_norm = query_norm ? vector_of(*query_norm, final_norm_, size) : nullptr,
            .key_norm = key_norm ? vector_of(*key_norm, final_norm_, size) : nullptr,
            .group = group,
            .cache = cache,
        });
        caches_.push_back(keys);
        for (const auto &tensor : {attention_norm, mlp_norm, keys, values}) kept_.push_back(tensor);
        for (const auto &norm : {query_norm, key_norm})
            if (norm) kept_.push_back(*norm);
    }

    // The embeddings are the weights of a linear's outputs, or a table (V, hidden); the head must
    // live as long as the stack, and such a linear, too.
    void set_ends(const Linear *embedding, const Optional &table, const Linear &head) {
        TORCH_CHECK(
            (embedding != nullptr) != table.has_value(), "embeddings are a linear's, or a table");
        const PackedLinear &last = head.packed();
        check_linear(last, hidden_, last.outputs);
        ends_ = StackEnds{};
        ends_->head = &last;
        if (table) {
            ends_->table = vector_of(*table, final_norm_, table->size(0) * hidden_);
            kept_.push_back(*table);
            vocabulary_ = table->size(0);
        } else {
            const PackedLinear &first = embedding->packed();
            check_linear(first, hidden_, first.outputs);
            ends_->embedding = &first;
            vocabulary_ = first.outputs;
        }
    }

    // residual (T, hidden), overwritten; cos, sin (positions, 1, R); positions (T,); rows of each
    // cache group -> normalised (T, hidden), and whether all numbers of each token are finite
    // (T,), or none if all are.
    std::pair<at::Tensor, Optional> forward(
        at::Tensor residual, const at::Tensor &cos, const at::Tensor &sin, const Ints &positions,
        const std::vector<const Rows *> &rows) {
        TORCH_CHECK(
            residual.is_cpu() && residual.dim() == 2 && residual.size(1) == hidden_ &&
                residual.is_contiguous() &&
                residual.scalar_type() == final_norm_.scalar_type(),
            "the residual stream is (T, hidden) in one piece");
        at::Tensor out = at::empty_like(residual);
        Optional finite = run(residual, out, nullptr, cos, sin, positions, rows);
        return {out, finite};
    }

    // ids (T,); wanted (L,) tokens whose logits are, rising; the others as above -> normalised
    // (T, hidden); whether all numbers of each token are finite, as above; logits (L, V) float32;
    // of each row the same; the first of its greatest (L,)
    std::tuple<at::Tensor, Optional, at::Tensor, Optional, Ints> score(
        const Ints &ids, const Ints &wanted, const at::Tensor &cos, const at::Tensor &sin,
        const Ints &positions, const std::vector<const Rows *> &rows) {
        TORCH_CHECK(ends_.has_value(), "this stack has no embedding and no head");
        const int64_t tokens = ids.size(), count = wanted.size();
        for (int64_t i = 0; i < tokens; ++i)
            TORCH_CHECK_INDEX(
                0 <= ids.data()[i] && ids.data()[i] < vocabulary_, "token ", ids.data()[i], " of ",
                vocabulary_);
        for (int64_t i = 0, least = 0; i < count; least = wanted.data()[i++] + 1)
            TORCH_CHECK_INDEX(
                least <= wanted.data()[i] && wanted.data()[i] < tokens,
                "wanted are some of the tokens, rising");
        const auto options = final_norm_.options();
        at::Tensor residual = at::empty({tokens, hidden_}, options), out = at::empty_like(residual);
        at::Tensor logits = at::empty({count, ends_->head->outputs}, options.dtype(at::kFloat));
        at::Tensor finite = at::empty({count}, options.dtype(at::kBool));
        Ints likeliest(count);
        StackEnds ends = *ends_;
        ends.ids = ids.data();
        ends.wanted = wanted.data();
        ends.count = count;
        ends.logits = logits.mutable_data_ptr<float>();
        ends.finite = finite.mutable_data_ptr<bool>();
        ends.likeliest = likeliest.mutable_data();
        Optional tokens_finite = run(residual, out, &ends, cos, sin, positions, rows);
        return {out, tokens_finite, logits, flags_of(finite), likeliest};
    }

  private:
    Optional run(
        at::Tensor &residual, at::Tensor &out, StackEnds *ends, const at::Tensor &cos,
        const at::Tensor &sin, const Ints &positions, const std::vector<const Rows *> &rows) {
        const int64_t tokens = residual.size(0), turns = cos.size(0);
        TORCH_CHECK(tokens > 0, "a pass has tokens");
        const int64_t rotated = rotated_of(cos, caches_.front().size(3));
        TORCH_CHECK(positions.size() == tokens, "a position a token");
        for (int64_t i = 0; i < tokens; ++i)
            TORCH_CHECK_INDEX(
                0 <= positions.data()[i] && positions.data()[i] < turns, "position ",
                positions.data()[i], " of ", turns);
        const std::vector<StackGroup> groups = groups_of(rows, tokens);
        at::Tensor finite = at::empty({tokens}, residual.options().dtype(at::kBool));
        StackCall call = {
            .number = number_of(residual),
            .layers = layers_.data(),
            .count = static_cast<int64_t>(layers_.size()),
            .hidden = hidden_,
            .tokens = tokens,
            .eps = eps_,
            .scale = scale_,
            .groups = groups.data(),
            .one_each = rows.front()->one_each(),
            .cos = vector_of(cos, residual, turns * rotated),
            .sin = vector_of(sin, residual, turns * rotated),
            .rotated = rotated,
            .positions = positions.data(),
            .final_norm = final_norm_.const_data_ptr(),
            .residual = residual.mutable_data_ptr(),
            .out = out.mutable_data_ptr(),
            .finite = finite.mutable_data_ptr<bool>(),
            .ends = ends,
            .normed = nullptr,
            .added = nullptr,
            .heads = nullptr,
            .mixed = nullptr,
            .gated = nullptr,
        };
        make_room(call, ends);
        const int team = threads();
        {
            const Computing computing;
            kernels().stack(call, team);
        }
        return flags_of(finite);
    }

    // Flags, or none if all are set.
    static Optional flags_of(const at::Tensor &flags) {
        if (all_true(flags)) return std::nullopt;
        return flags;
    }

    void check_linear(const PackedLinear &linear, int64_t inputs, int64_t outputs) const {
        TORCH_CHECK(
            linear.inputs == inputs && linear.outputs == outputs &&
                linear.number == number_of(final_norm_),
            "a linear of ", linear.inputs, " to ", linear.outputs, " where one of ", inputs, " to ",
            outputs, " belongs");
    }

    std::vector<StackGroup> groups_of(const std::vector<const Rows *> &rows, int64_t tokens) const {
        TORCH_CHECK(!rows.empty() && !layers_.empty(), "a stack has layers, and rows of groups");
        std::vector<StackGroup> groups;
        for (const Rows *each : rows) {
            TORCH_CHECK(each != nullptr, "None is no rows");
            TORCH_CHECK(
                each->tokens() == tokens, "rows of ", each->tokens(), " tokens, not ", tokens);
            groups.push_back({
                .shape = {},
                .rows = each->paged(),
                .places = each->places().data(),
                .tasks = each->tasks().data(),
                .count = static_cast<int64_t>(each->tasks().size()),
            });
        }
        for (size_t i = 0; i < layers_.size(); ++i) {
            const auto group = static_cast<size_t>(layers_[i].group);
            const at::Tensor &keys = caches_[i];
            TORCH_CHECK(group < rows.size(), "there are no rows of group ", group);
            const CacheShape shape = rows[group]->shape_in(
                number_of(final_norm_), kept_of(keys, final_norm_), keys.size(0));
            TORCH_CHECK(
                groups[group].shape.heads == 0 || groups[group].shape.kept == shape.kept,
                "layers of a cache group keep the same");
            TORCH_CHECK(
                keys.size(1) == shape.page_tokens && keys.size(2) == shape.heads &&
                    keys.size(3) == shape.head_size &&
                    layers_[i].qkv.outputs ==
                        shape.heads * (shape.queries_per_head + 2) * shape.head_size,
                "the cache has another shape than the rows");
            groups[group].shape = shape;
        }
        return groups;
    }

    // Activations of all tokens, in one piece that is kept and grows.
    void make_room(StackCall &call, StackEnds *ends) {
        const int64_t heads = layers_.front().qkv.outputs, mixed = layers_.front().out.inputs;
        int64_t width = 0;
        for (const StackLayer &layer : layers_) {
            TORCH_CHECK(layer.qkv.outputs == heads, "all layers have the same heads");
            width = std::max(width, layer.down.inputs);
        }
        const int64_t row = call.tokens * final_norm_.element_size();
        std::vector<std::pair<void **, int64_t>> parts = {
            {&call.normed, row * hidden_}, {&call.added, row * hidden_}, {&call.heads, row * heads},
            {&call.mixed, row * mixed},    {&call.gated, row * width},
        };
        void *scans = nullptr;
        if (ends != nullptr) {
            const int64_t size = scan_parts(ends->head->outputs) * sizeof(PartScan);
            parts.emplace_back(
                &ends->picked, ends->count * hidden_ * final_norm_.element_size());
            parts.emplace_back(&scans, ends->count * size);
        }
        int64_t total = 0;
        for (const auto &[_, bytes] : parts) total += padded(bytes);
        if (!room_.defined() || room_.numel() < total)
            room_ = at::empty({total}, at::TensorOptions(at::kByte));
        auto *at = static_cast<char *>(room_.mutable_data_ptr());
        for (const auto &[part, bytes] : parts) {
            *part = at;
            at += padded(bytes);
        }
        if (ends != nullptr) ends->parts = static_cast<PartScan *>(scans);
    }

    static int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

    at::Tensor final_norm_;
    int64_t hidden_;
    float eps_, scale_;
    std::vector<StackLayer> layers_;
    std::vector<at::Tensor> caches_, kept_;
    std::optional<StackEnds> ends_;  // of each call: without what belongs to one
    int64_t vocabulary_ = 0;         // tokens that have an embedding
    at::Tensor room_;
};

}  // namespace

void bind_stack(py::module_ &module) {
    py::class_<Stack>(module, "Stack")
        .def(
            py::init<at::Tensor, double, double>(), py::kw_only(), py::arg("final_norm"),
            py::arg("eps"), py::arg("scale"))
        .def(
            "add", &Stack::add, py::kw_only(), py::arg("qkv"), py::arg("out"), py::arg("gate_up"),
            py::arg("down"), py::arg("attention_norm"), py::arg("mlp_norm"), py::arg("query_norm"),
            py::arg("key_norm"), py::arg("group"), py::arg("keys"), py::arg("values"),
            py::arg("scales"),
            py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>(),
            py::keep_alive<1, 5>())
        .def(
            "set_ends", &Stack::set_ends, py::kw_only(), py::arg("embedding"), py::arg("table"),
            py::arg("head"), py::keep_alive<1, 2>(), py::keep_alive<1, 4>())
        .def("forward", &Stack::forward)
        .def("score", &Stack::score);
}
