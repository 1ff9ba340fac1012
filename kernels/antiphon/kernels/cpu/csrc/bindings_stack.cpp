// All layers of a decoder as one call a step.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bindings.h"
#include "linear.h"
#include "mixture.h"
#include "rows.h"
#include "tensors.h"

namespace {

using Optional = std::optional<at::Tensor>;
using Ints = AttentionMetadata::Ints;
using GroupMetadata = std::vector<std::shared_ptr<AttentionMetadata>>;

// Memory of a result that is reused once no reference to that result is left: fresh memory costs
// microseconds of cold code, and the kernel zeroes large memory page by page.
class ReusableTensor {
  public:
    // Room for a result, until the next call; what was given away is left alone.
    void *reserve(at::IntArrayRef sizes, at::ScalarType type) {
        // Views and arrays count, too: each of them holds the memory.
        if (!own_.defined() || own_.storage().use_count() > 1 || own_.scalar_type() != type ||
            own_.sizes() != sizes) {
            own_.reset();
            own_ = at::empty(sizes, at::TensorOptions(type));
        }
        return own_.mutable_data_ptr();
    }

    // What was written there.
    at::Tensor tensor() const {
        at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(own_.storage()), own_.key_set(), own_.dtype());
        result.unsafeGetTensorImpl()->set_sizes_contiguous(own_.sizes());
        return result;
    }

    void forget() { own_.reset(); }

  private:
    at::Tensor own_;  // not shared, but its memory may be
};

// An array of int32 in one piece, mostly as it is: to ask numpy for that runs much cold code.
Ints ints_of(py::handle array) {
    static const PyObject *int32 = py::dtype::of<int32_t>().release().ptr();
    const auto &api = py::detail::npy_api::get();
    if (api.PyArray_Check_(array.ptr())) {
        const auto *info = py::detail::array_proxy(array.ptr());
        if (info->descr == int32 && (info->flags & py::array::c_style) != 0)
            return py::reinterpret_borrow<Ints>(array);
    }
    Ints made = Ints::ensure(array);
    if (!made) throw py::type_error("expected an array of int32");
    return made;
}

class Stack {
  public:
    // A norm has a weight (hidden,), and a layer norm may have a bias.
    using Norm = std::pair<at::Tensor, Optional>;

    Stack(NormKind norm, bool post_norms, const Norm &final_norm, double eps, double scale)
        : norm_(norm),
          post_norms_(post_norms),
          final_norm_(final_norm.first),
          hidden_(final_norm_.numel()),
          dtype_(dtype_of(final_norm_)),
          eps_(static_cast<float>(eps)),
          scale_(static_cast<float>(scale)) {
        TORCH_CHECK(
            hidden_ > 0 && final_norm_.is_contiguous(), "the final norm is (hidden,) in one piece");
        final_ = keep(final_norm);
    }

    // Pages of keys and of values of a layer (kv_layout.h), and their scales; or of a bidirectional
    // one, which keeps none, H and D.
    using Cache = std::tuple<at::Tensor, at::Tensor, double, double>;
    using Heads = std::pair<int64_t, int64_t>;

    // The linears and experts must live as long as the stack; there are gate_up and down, or experts.
    // Without `activation`, gate_up are both, and become silu(gate) * up.
    void add(
        const Linear &qkv, const Linear &out, const Linear *gate_up, const Linear *down,
        const MixtureOfExperts *experts, const std::optional<Activation> &activation,
        const Norm &attention_norm, const Norm &mlp_norm, const Optional &query_norm,
        const Optional &key_norm, int64_t group, const std::variant<Cache, Heads> &cached) {
        LayerCache cache = {nullptr, nullptr, 1.0f, 1.0f};
        CacheShape shape = {
            .dtype = dtype_,
            .format = CacheFormat::model,
            .pages = 0,
            .page_tokens = 0,
            .heads = 0,
            .queries_per_head = 0,  // rows say this, and the window
            .head_size = 0,
            .window = 0,
        };
        if (const auto *kept = std::get_if<Cache>(&cached)) {
            const auto &[keys, values, key_scale, value_scale] = *kept;
            cache = layer_of(keys, values, key_scale, value_scale);
            shape = cache_shape_of(keys, values, final_norm_);
            kept_.push_back(keys);
            kept_.push_back(values);
        } else {
            std::tie(shape.heads, shape.head_size) = std::get<Heads>(cached);
        }
        const int64_t heads = shape.heads, size = shape.head_size;
        const PackedLinear &first = qkv.packed();
        check_linear(first, hidden_, first.outputs);
        check_linear(out.packed(), first.outputs - 2 * heads * size, hidden_);
        check_feed_forward(gate_up, down, experts, activation.has_value());
        PackedLinear up = gate_up != nullptr ? gate_up->packed() : PackedLinear{};
        TORCH_CHECK(
            activation != Activation::clamped_swish, "a clamped swish is between gate and up");
        if (activation) up.activation = *activation;
        TORCH_CHECK(group >= 0, "a layer is of a cache group");
        TORCH_CHECK(
            layers_.empty() || layers_.front().qkv.outputs == first.outputs,
            "all layers have the same heads");
        note_shape(group, shape);
        mixed_ = std::max(mixed_, out.packed().inputs);
        if (down != nullptr) width_ = std::max(width_, down->packed().inputs);
        can_decode_next_ = false;
        TORCH_CHECK(query_norm.has_value() == key_norm.has_value(), "both norms or none");
        layers_.push_back({
            .qkv = first,
            .out = out.packed(),
            .gate_up = up,
            .down = down != nullptr ? down->packed() : PackedLinear{},
            .experts = experts != nullptr ? &experts->packed() : nullptr,
            .attention_norm = keep(attention_norm),
            .mlp_norm = keep(mlp_norm),
            .query_norm = query_norm ? vector_of(*query_norm, final_norm_, size) : nullptr,
            .key_norm = key_norm ? vector_of(*key_norm, final_norm_, size) : nullptr,
            .group = group,
            .cache = cache,
        });
        mixtures_.push_back(experts);
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
        can_decode_next_ = false;
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
        const at::Tensor &residual, const at::Tensor &cos, const at::Tensor &sin,
        const Ints &positions, GroupMetadata rows) {
        can_decode_next_ = false;
        TORCH_CHECK(
            residual.is_cpu() && residual.dim() == 2 && residual.size(1) == hidden_ &&
                residual.is_contiguous() && residual.scalar_type() == final_norm_.scalar_type(),
            "the residual stream is (T, hidden) in one piece");
        take(residual.size(0), cos, sin, positions, std::move(rows));
        make_room(nullptr);
        at::Tensor out = at::empty_like(residual);
        call_.residual = residual.mutable_data_ptr();
        call_.out = out.mutable_data_ptr();
        compute();
        return {out, flags_of(call_.finite, call_.tokens)};
    }

    using Scores = std::tuple<Optional, Optional, Optional, Optional, Ints>;

    // ids (T,); wanted (L,) tokens whose logits are, rising; the others as above -> normalised
    // (T, hidden); whether all numbers of each token are finite, as above; logits (L, V) float32;
    // of each row the same; the first of its greatest (L,). A bare result has the last alone, if
    // all numbers are finite: to make Python's tensors takes as long as all other glue.
    Scores score(
        const Ints &ids, const Ints &logit_indices, const at::Tensor &cos, const at::Tensor &sin,
        const Ints &positions, GroupMetadata rows, bool argmax_only) {
        can_decode_next_ = false;
        TORCH_CHECK(ends_.has_value(), "this stack has no embedding and no head");
        check_ids(ids);
        const int64_t tokens = ids.size(), count = logit_indices.size();
        for (int64_t i = 0, least = 0; i < count; least = logit_indices.data()[i++] + 1)
            TORCH_CHECK_INDEX(
                least <= logit_indices.data()[i] && logit_indices.data()[i] < tokens,
                "logit indices are token indices, ascending");
        take(tokens, cos, sin, positions, std::move(rows));
        ends_->logit_indices = logit_indices.data();
        ends_->count = count;
        make_room(&*ends_);
        Scores scores = compute_scores(ids, argmax_only);
        ends_->logit_indices = nullptr;  // not read where all tokens have logits
        can_decode_next_ = count == tokens && all_one_each();
        if (!can_decode_next_) {  // this may be much, and the next one like it far
            states_.forget();
            logits_.forget();
        }
        return scores;
    }

    // The pass before one token further, if that was one of `score` or of this, with a token a row
    // and logits of all: ids (T,) and a table a cache group, after which others may follow -> as
    // `score`. Nothing where there is no such pass, or a position lies beyond cos and sin.
    std::optional<Scores> decode_next(
        py::handle tokens, const py::tuple &tables, bool argmax_only) {
        const Ints ids = ints_of(tokens);
        if (!can_decode_next_ || ids.size() != call_.tokens ||
            position_max_ + 1 >= known_positions_)
            return std::nullopt;
        can_decode_next_ = false;  // until all has gone well
        check_ids(ids);
        TORCH_CHECK(tables.size() >= rows_.size(), "a table a cache group");
        for (size_t i = 0; i < rows_.size(); ++i) {
            AttentionMetadata &rows = *rows_[i];
            rows.advance(ints_of(tables[i]));
            const int64_t pages = groups_[i].shape.pages;
            TORCH_CHECK(
                groups_[i].shape.heads == 0 || rows.pages_needed() <= pages, "a row has page ",
                rows.pages_needed() - 1, " of ", pages);
            set_tasks(groups_[i], rows);
        }
        for (int32_t &position : positions_) ++position;
        ++position_max_;
        Scores scores = compute_scores(ids, argmax_only);
        can_decode_next_ = true;
        return scores;
    }

  private:
    StackNorm keep(const Norm &norm) {
        const auto &[weight, bias] = norm;
        TORCH_CHECK(!bias || norm_ == NormKind::layer, "a norm by root-mean-square has no bias");
        kept_.push_back(weight);
        if (bias) kept_.push_back(*bias);
        return {
            vector_of(weight, final_norm_, hidden_),
            bias ? vector_of(*bias, final_norm_, hidden_) : nullptr};
    }

    // Note what the layers of a cache group have in common.
    void note_shape(int64_t group, const CacheShape &shape) {
        const auto index = static_cast<size_t>(group);
        if (shapes_.size() <= index) shapes_.resize(index + 1);
        std::optional<CacheShape> &noted = shapes_[index];
        TORCH_CHECK(
            !noted ||
                (noted->format == shape.format && noted->pages == shape.pages &&
                 noted->page_tokens == shape.page_tokens && noted->heads == shape.heads &&
                 noted->head_size == shape.head_size),
            "layers of a cache group keep the same");
        noted = shape;
        head_size_ = layers_.empty() ? shape.head_size : std::min(head_size_, shape.head_size);
    }

    void check_ids(const Ints &ids) const {
        for (int64_t i = 0; i < ids.size(); ++i)
            TORCH_CHECK_INDEX(
                0 <= ids.data()[i] && ids.data()[i] < vocabulary_, "token ", ids.data()[i], " of ",
                vocabulary_);
    }

    // Lay out the call of a pass, but for what it overwrites, and keep what it points to.
    void take(
        int64_t tokens, const at::Tensor &cos, const at::Tensor &sin, const Ints &positions,
        GroupMetadata rows) {
        TORCH_CHECK(tokens > 0, "a pass has tokens");
        const int64_t rotated = rotated_of(cos, head_size_);
        TORCH_CHECK(positions.size() == tokens, "a position a token");
        known_positions_ = cos.size(0);
        position_max_ = 0;
        for (int64_t i = 0; i < tokens; ++i) {
            const int64_t position = positions.data()[i];
            TORCH_CHECK_INDEX(
                0 <= position && position < known_positions_, "position ", position, " of ",
                known_positions_);
            position_max_ = std::max(position_max_, position);
        }
        set_groups(rows, tokens);
        rows_ = std::move(rows);
        cos_ = cos;
        sin_ = sin;
        positions_.assign(positions.data(), positions.data() + tokens);
        call_ = {
            .dtype = dtype_,
            .layers = layers_.data(),
            .count = static_cast<int64_t>(layers_.size()),
            .hidden = hidden_,
            .tokens = tokens,
            .norm = norm_,
            .post_norms = post_norms_,
            .eps = eps_,
            .scale = scale_,
            .groups = groups_.data(),
            .one_each = rows_.front()->one_each(),
            .cos = vector_of(cos, final_norm_, known_positions_ * rotated),
            .sin = vector_of(sin, final_norm_, known_positions_ * rotated),
            .rotated = rotated,
            .positions = positions_.data(),
            .final_norm = final_,
            .pass_cache = pass_cache(),
            .residual = nullptr,
            .out = nullptr,
            .finite = nullptr,
            .ends = nullptr,
            .normed = nullptr,
            .added = nullptr,
            .heads = nullptr,
            .mixed = nullptr,
            .gated = nullptr,
            .experts_rooms = nullptr,
            .experts_plans = nullptr,
        };
    }

    bool all_one_each() const {
        return std::all_of(
            rows_.begin(), rows_.end(), [](const auto &rows) { return rows->one_each(); });
    }

    // The pass that is laid out, from ids to logits.
    Scores compute_scores(const Ints &ids, bool argmax_only) {
        const int64_t tokens = call_.tokens, count = ends_->count;
        Ints argmax(count);
        call_.out = states_.reserve({tokens, hidden_}, final_norm_.scalar_type());
        ends_->ids = ids.data();
        ends_->logits =
            static_cast<float *>(logits_.reserve({count, ends_->head->outputs}, at::kFloat));
        ends_->argmax = argmax.mutable_data();
        compute();
        Optional finite = flags_of(call_.finite, tokens);
        Optional logits_finite = flags_of(ends_->finite, count);
        if (argmax_only && !finite && !logits_finite) return {{}, {}, {}, {}, argmax};
        return {
            states_.tensor(), std::move(finite), logits_.tensor(), std::move(logits_finite),
            std::move(argmax)};
    }

    void compute() {
        const int team = threads();
        const KernelTimer computing;
        kernels().stack(call_, team);
    }

    // Flags, or none if all are set.
    static Optional flags_of(const bool *flags, int64_t count) {
        if (std::all_of(flags, flags + count, [](bool flag) { return flag; })) return std::nullopt;
        at::Tensor kept = at::empty({count}, at::TensorOptions(at::kBool));
        std::memcpy(kept.mutable_data_ptr<bool>(), flags, count);
        return kept;
    }

    void check_linear(const PackedLinear &linear, int64_t inputs, int64_t outputs) const {
        TORCH_CHECK(
            linear.inputs == inputs && linear.outputs == outputs && linear.dtype == dtype_,
            "a linear of ", linear.inputs, " to ", linear.outputs, " where one of ", inputs, " to ",
            outputs, " belongs");
    }

    void check_feed_forward(
        const Linear *gate_up, const Linear *down, const MixtureOfExperts *experts,
        bool plain) const {
        TORCH_CHECK(
            (gate_up != nullptr) == (down != nullptr) && (down != nullptr) != (experts != nullptr),
            "a layer has gate_up and down, or experts");
        if (experts != nullptr) {
            TORCH_CHECK(
                experts->packed().hidden == hidden_ && experts->packed().dtype == dtype_,
                "experts of ", experts->packed().hidden, " where ", hidden_, " belong");
            return;
        }
        const PackedLinear &last = down->packed();
        check_linear(gate_up->packed(), hidden_, plain ? last.inputs : 2 * last.inputs);
        check_linear(last, last.inputs, hidden_);
        TORCH_CHECK(
            gate_up->packed().halves == !plain,
            "gate and up are packed in halves, up alone is not");
    }

    void set_groups(const GroupMetadata &rows, int64_t tokens) {
        TORCH_CHECK(!rows.empty() && !layers_.empty(), "a stack has layers, and rows of groups");
        TORCH_CHECK(
            shapes_.size() <= rows.size(), "there are no rows of group ", shapes_.size() - 1);
        groups_.clear();
        for (size_t i = 0; i < rows.size(); ++i) {
            TORCH_CHECK(rows[i] != nullptr, "None is no rows");
            const AttentionMetadata &each = *rows[i];
            TORCH_CHECK(
                each.tokens() == tokens, "rows of ", each.tokens(), " tokens, not ", tokens);
            groups_.push_back({
                .shape = shape_of(i, each),
                .rows = {},
                .places = each.places().data(),
                .tasks = nullptr,
                .count = 0,
                .merges = nullptr,
                .merge_count = 0,
                .partials = nullptr,
            });
            set_tasks(groups_.back(), each);
        }
    }

    // What changes when rows go on.
    static void set_tasks(StackGroup &group, const AttentionMetadata &rows) {
        group.rows = rows.paged();
        group.tasks = rows.tasks().data();
        group.count = static_cast<int64_t>(rows.tasks().size());
        group.merges = rows.merges().data();
        group.merge_count = static_cast<int64_t>(rows.merges().size());
        group.partials = rows.partials();
    }

    // The shape of a group's caches with the rows' window; without layers it has none.
    CacheShape shape_of(size_t group, const AttentionMetadata &rows) const {
        if (group >= shapes_.size() || !shapes_[group]) return {};
        const CacheShape &kept = *shapes_[group];
        const bool cached = kept.pages > 0;
        const CacheShape shape =
            rows.shape_in(dtype_, kept.format, cached ? kept.pages : rows.pages_needed());
        TORCH_CHECK(cached != shape.bidirectional, "rows that see both ways are not cached");
        TORCH_CHECK(
            (cached ? fits(shape, kept)
                    : kept.heads == shape.heads && kept.head_size == shape.head_size) &&
                layers_.front().qkv.outputs ==
                    shape.heads * (shape.queries_per_head + 2) * shape.head_size,
            "the cache has another shape than the rows");
        return shape;
    }

    // Keys and values of one layer of the pass that is laid out, where none are kept.
    LayerCache pass_cache() {
        int64_t most = 0;
        for (const StackGroup &group : groups_)
            if (const CacheShape &shape = group.shape; shape.bidirectional)
                most = std::max(most, KvLayout(shape).head_at(shape.pages, 0));
        if (most == 0) return {nullptr, nullptr, 1.0f, 1.0f};
        if (!whole_.defined() || whole_.numel() < 2 * most)
            whole_ = at::empty({2 * most}, final_norm_.options());
        auto *keys = static_cast<char *>(whole_.mutable_data_ptr());
        return {keys, keys + most * whole_.element_size(), 1.0f, 1.0f};
    }

    // What the pass that is laid out writes beside its results, in one piece that is kept and
    // grows.
    void make_room(StackEnds *ends) {
        const int64_t heads = layers_.front().qkv.outputs;
        const int64_t row = call_.tokens * final_norm_.element_size();
        void *finite = nullptr, *logits_finite = nullptr, *scans = nullptr, *experts = nullptr;
        int64_t experts_bytes = 0;  // one layer after the other has the same
        for (const MixtureOfExperts *each : mixtures_)
            if (each) experts_bytes = std::max(experts_bytes, each->room_bytes(call_.tokens));
        std::vector<std::pair<void **, int64_t>> parts = {
            {&call_.normed, row * hidden_}, {&call_.added, row * hidden_},
            {&call_.heads, row * heads},    {&call_.mixed, row * mixed_},
            {&call_.gated, row * width_},   {&finite, call_.tokens},
            {&experts, experts_bytes},
        };
        if (ends != nullptr) {
            const int64_t size = scan_parts(ends->head->outputs) * sizeof(PartScan);
            parts.emplace_back(&call_.residual, row * hidden_);
            parts.emplace_back(&ends->gathered, ends->count * hidden_ * final_norm_.element_size());
            parts.emplace_back(&scans, ends->count * size);
            parts.emplace_back(&logits_finite, ends->count);
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
        call_.finite = static_cast<bool *>(finite);
        experts_rooms_.clear();
        for (const MixtureOfExperts *each : mixtures_)
            experts_rooms_.push_back(
                each != nullptr ? each->room_at(static_cast<char *>(experts), call_.tokens)
                                : ExpertsRoom{});
        experts_plans_.resize(mixtures_.size());
        call_.experts_rooms = experts_rooms_.data();
        call_.experts_plans = experts_plans_.data();
        call_.ends = ends;
        if (ends == nullptr) return;
        ends->finite = static_cast<bool *>(logits_finite);
        ends->parts = static_cast<PartScan *>(scans);
    }

    static int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

    NormKind norm_;
    bool post_norms_;
    at::Tensor final_norm_;
    StackNorm final_ = {};
    int64_t hidden_;
    Dtype dtype_;
    float eps_, scale_;
    std::vector<StackLayer> layers_;
    std::vector<std::optional<CacheShape>> shapes_;   // of each cache group's layers
    int64_t head_size_ = 0;                           // the least
    int64_t mixed_ = 0, width_ = 0;                   // the most that goes into out, and into down
    std::vector<const MixtureOfExperts *> mixtures_;  // of each layer, or null
    std::vector<ExpertsRoom> experts_rooms_;          // likewise
    std::vector<ExpertsPlan> experts_plans_;
    std::vector<at::Tensor> kept_;
    int64_t vocabulary_ = 0;  // tokens that have an embedding

    // The last pass: how it was called, and what that points to.
    StackCall call_ = {};
    std::optional<StackEnds> ends_;
    GroupMetadata rows_;
    std::vector<StackGroup> groups_;
    at::Tensor cos_, sin_;
    std::vector<int32_t> positions_;
    int64_t known_positions_ = 0,
            position_max_ = 0;      // positions of cos and sin, and the greatest of the pass
    bool can_decode_next_ = false;  // whether `again` may follow

    at::Tensor room_, whole_;
    ReusableTensor states_, logits_;
};

}  // namespace

void bind_stack(py::module_ &module) {
    py::enum_<NormKind>(module, "NormKind")
        .value("rms", NormKind::rms)
        .value("layer", NormKind::layer);
    py::class_<Stack>(module, "Stack")
        .def(
            py::init<NormKind, bool, const Stack::Norm &, double, double>(), py::kw_only(),
            py::arg("norm"), py::arg("post_norms"), py::arg("final_norm"), py::arg("eps"),
            py::arg("scale"))
        .def(
            "add", &Stack::add, py::kw_only(), py::arg("qkv"), py::arg("out"), py::arg("gate_up"),
            py::arg("down"), py::arg("experts"), py::arg("activation"), py::arg("attention_norm"),
            py::arg("mlp_norm"), py::arg("query_norm"), py::arg("key_norm"), py::arg("group"),
            py::arg("cache"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(),
            py::keep_alive<1, 4>(), py::keep_alive<1, 5>(), py::keep_alive<1, 6>())
        .def(
            "set_ends", &Stack::set_ends, py::kw_only(), py::arg("embedding"), py::arg("table"),
            py::arg("head"), py::keep_alive<1, 2>(), py::keep_alive<1, 4>())
        .def("forward", &Stack::forward)
        .def("score", &Stack::score)
        .def("decode_next", &Stack::decode_next);
}
