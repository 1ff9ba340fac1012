// All layers of a decoder as one call a step.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
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
#include "states.h"
#include "tensors.h"

namespace {

using Optional = std::optional<at::Tensor>;
using Ints = AttentionMetadata::Ints;
using GroupMetadata = std::vector<std::shared_ptr<AttentionMetadata>>;
using StatesMetadata = std::vector<std::shared_ptr<StateMetadata>>;

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
    using MaybeNorm = std::optional<NormTensors>;  // (hidden,)
    // Before, after and with a block.
    using BlockNorms = std::array<MaybeNorm, 3>;

    Stack(Dtype dtype, int64_t hidden, NormKind norm, const MaybeNorm &final_norm, double eps)
        : norm_(norm),
          hidden_(hidden),
          dtype_(dtype),
          like_(
              at::empty({0}, at::TensorOptions(dtype == Dtype::bf16 ? at::kBFloat16 : at::kFloat))),
          eps_(static_cast<float>(eps)) {
        TORCH_CHECK(hidden_ > 0, "the residual stream has a width");
        final_ = keep(final_norm);
    }

    // Pages of keys and of values of a layer (kv_layout.h), and their scales; or of a bidirectional
    // one, which keeps none, H and D.
    using Cache = std::tuple<at::Tensor, at::Tensor, double, double>;
    using Heads = std::pair<int64_t, int64_t>;

    // A recurrence with its linears, factors of what it reads and gives, its states and their group.
    using Recurrent = std::tuple<
        const RecurrentLayer *, const Linear *, const Linear *, std::pair<double, double>,
        at::Tensor, at::Tensor, int64_t>;

    // Latent attention: linears of queries (down, with its norm and eps, or none; up) and of latents
    // with their norm and eps; of heads to latents and back; C and O; whether pairs lie side by side.
    using Latent = std::tuple<
        const Linear *, std::optional<at::Tensor>, double, const Linear *, const Linear *,
        at::Tensor, double, const HeadLinears *, const HeadLinears *, int64_t, int64_t, bool>;

    // All that is given by reference must live as long as the stack; there are qkv and out, a
    // recurrence, or both, and gate_up and down, or experts. Latent attention has its own in place of
    // qkv. Packed in halves, gate_up are both, and become activation(gate) * up; `mlp_scales` are
    // factors of the gate and of what down gives. With `gated` attention, gates of query heads follow
    // values. `rotary` is the index of the cosines and sines among those of a pass.
    void add(
        const Linear *qkv, const Linear *out, bool gated,
        const std::pair<double, double> &attention_scales,
        const std::optional<Recurrent> &recurrent, const std::optional<Latent> &latent,
        const Linear *gate_up, const Linear *down, const MixtureOfExperts *experts,
        Activation activation, const std::pair<double, double> &mlp_scales,
        const BlockNorms &attention_norms, const BlockNorms &mlp_norms, bool parallel,
        double multiplier, const std::optional<QkNormTensors> &head_norms, double scale,
        std::optional<double> softcap, const Optional &sinks, int64_t rotary, int64_t group,
        const std::optional<std::variant<Cache, Heads>> &cached) {
        const bool attends = out != nullptr;
        TORCH_CHECK(
            attends == (qkv != nullptr || latent.has_value()) && (qkv == nullptr || !latent) &&
                attends == cached.has_value() && (attends || recurrent),
            "a layer has attention with a cache, a recurrence, or both");
        LayerCache cache = {nullptr, nullptr, 1.0f, 1.0f, 0, 0};
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
        if (const auto *kept = attends ? std::get_if<Cache>(&*cached) : nullptr) {
            const auto &[keys, values, key_scale, value_scale] = *kept;
            cache = layer_of(keys, values, key_scale, value_scale);
            shape = cache_shape_of(keys, values, like_);
            kept_.push_back(keys);
            kept_.push_back(values);
        } else if (attends) {
            std::tie(shape.heads, shape.head_size) = std::get<Heads>(*cached);
        }
        const int64_t heads = shape.heads, size = shape.head_size;
        const PackedLinear first = qkv != nullptr ? qkv->packed() : PackedLinear{};
        const StackLatent latents = keep(latent, shape);
        const int64_t width = latent ? latents.heads * latents.head_size()
                                     : (first.outputs - 2 * heads * size) / (gated ? 2 : 1);
        const int64_t queries = attends ? width / size : 0;
        if (latent) {
            check_linear(out->packed(), latents.heads * latents.value, hidden_);
            TORCH_CHECK(
                !recurrent && !gated && !softcap && !sinks && !head_norms,
                "latent attention has nothing beside it");
        } else if (attends) {
            check_linear(first, hidden_, (gated ? 2 : 1) * width + 2 * heads * size);
            check_linear(out->packed(), width, hidden_);
        }
        const StackRecurrence recurrence = keep(recurrent);
        check_feed_forward(gate_up, down, experts);
        PackedLinear up = gate_up != nullptr ? gate_up->packed() : PackedLinear{};
        TORCH_CHECK(
            activation != Activation::clamped_swish, "a clamped swish is between gate and up");
        up.activation = activation;
        up.gate_scale = static_cast<float>(mlp_scales.first);
        TORCH_CHECK(
            mlp_scales == std::make_pair(1.0, 1.0) || (experts == nullptr && up.halves),
            "a gate has factors");
        TORCH_CHECK(group >= 0, "a layer is of a cache group");
        TORCH_CHECK(rotary >= 0, "a layer has a rotation");
        if (attends) {
            const int64_t projected =
                latent ? latents.heads * (latents.content + latents.position) : first.outputs;
            TORCH_CHECK(
                heads_ == 0 || (heads_ == projected && queries_ == width),
                "all layers have the same heads");
            heads_ = projected;
            queries_ = width;
            note_shape(group, shape);
            note_rotary(rotary, latent ? latents.position : size);
            mixed_ = std::max(mixed_, width);
        }
        parallel_ = parallel_ || parallel;
        both_ = both_ || (attends && recurrent);
        const MixerScales attention_factors = scales_of(attention_scales);
        const MixerScales recurrence_factors =
            recurrent ? scales_of(std::get<3>(*recurrent)) : MixerScales{1.0f, 1.0f};
        scaled_ = scaled_ || attention_factors.in != 1.0f || recurrence_factors.in != 1.0f;
        if (down != nullptr) width_ = std::max(width_, down->packed().inputs);
        can_decode_next_ = false;
        if (head_norms) head_norms_.push_back(*head_norms);
        TORCH_CHECK(!softcap || *softcap > 0.0, "a cap is positive, and not ", *softcap);
        if (sinks) kept_.push_back(*sinks);
        layers_.push_back({
            .attends = attends,
            .qkv = first,
            .out = attends ? out->packed() : PackedLinear{},
            .latent = latents,
            .gated = gated,
            .attention_scales = attention_factors,
            .recurrence = recurrence,
            .recurrence_scales = recurrence_factors,
            .gate_up = up,
            .down = down != nullptr ? down->packed() : PackedLinear{},
            .mlp_scale = static_cast<float>(mlp_scales.second),
            .experts = experts != nullptr ? &experts->packed() : nullptr,
            .attention_norms = keep(attention_norms),
            .mlp_norms = keep(mlp_norms),
            .parallel = parallel,
            .multiplier = static_cast<float>(multiplier),
            .head_norms = head_norms ? head_norms->plain(like_, queries, heads, size) : NO_QK_NORMS,
            .scale = static_cast<float>(scale),
            .softcap = static_cast<float>(softcap.value_or(0.0)),
            .sinks = sinks ? vector_of(*sinks, like_, queries) : nullptr,
            .rotary = rotary,
            .group = group,
            .cache = cache,
        });
        mixtures_.push_back(experts);
    }

    // The embeddings are the weights of a linear's outputs, or a table (V, hidden); the head must
    // live as long as the stack, and such a linear, too. Learned positions (positions, hidden).
    void set_ends(
        const Linear *embedding, const Optional &table, double scale, const Optional &positions,
        const Linear &head, double logits_scale, double softcap) {
        TORCH_CHECK(
            (embedding != nullptr) != table.has_value(), "embeddings are a linear's, or a table");
        const PackedLinear &last = head.packed();
        check_linear(last, hidden_, last.outputs);
        can_decode_next_ = false;
        ends_ = StackEnds{};
        ends_->head = &last;
        ends_->scale = static_cast<float>(scale);
        ends_->logits_scale = static_cast<float>(logits_scale);
        ends_->softcap = static_cast<float>(softcap);
        if (positions) {
            learned_positions_ = positions->size(0);
            ends_->learned_positions = vector_of(*positions, like_, learned_positions_ * hidden_);
            kept_.push_back(*positions);
        }
        if (table) {
            ends_->table = vector_of(*table, like_, table->size(0) * hidden_);
            kept_.push_back(*table);
            vocabulary_ = table->size(0);
        } else {
            const PackedLinear &first = embedding->packed();
            check_linear(first, hidden_, first.outputs);
            ends_->embedding = &first;
            vocabulary_ = first.outputs;
        }
    }

    // Each pass gives the stream as it enters these layers, ascending, too.
    void set_aux_layers(std::vector<int64_t> layers) {
        int64_t least = 0;
        for (const int64_t layer : layers) {
            TORCH_CHECK(
                least <= layer && layer < static_cast<int64_t>(layers_.size()),
                "auxiliary layers are layers, ascending");
            least = layer + 1;
        }
        can_decode_next_ = false;
        aux_layers_ = std::move(layers);
    }

    // Cosines and sines, (positions, 1, R) both, and factors of queries (positions,) float32.
    using Rotaries = std::vector<std::tuple<at::Tensor, at::Tensor, Optional>>;

    using States = std::tuple<at::Tensor, Optional, Optional>;

    // residual (T, hidden), overwritten; rotations; positions (T,); rows of each cache group, and of
    // each group of states -> normalised (T, hidden); whether all numbers of each token are finite
    // (T,), or none if all are; the streams that enter the auxiliary layers (T, layers * hidden), or
    // none.
    States forward(
        const at::Tensor &residual, Rotaries rotaries, const Ints &positions, GroupMetadata rows,
        StatesMetadata states) {
        can_decode_next_ = false;
        TORCH_CHECK(
            residual.is_cpu() && residual.dim() == 2 && residual.size(1) == hidden_ &&
                residual.is_contiguous() && residual.scalar_type() == like_.scalar_type(),
            "the residual stream is (T, hidden) in one piece");
        take(residual.size(0), std::move(rotaries), positions, std::move(rows), std::move(states));
        make_room(nullptr);
        at::Tensor out = at::empty_like(residual);
        call_.residual = residual.mutable_data_ptr();
        call_.out = out.mutable_data_ptr();
        Optional aux = reserve_aux();
        compute();
        return {out, flags_of(call_.finite, call_.tokens), std::move(aux)};
    }

    using Scores = std::tuple<Optional, Optional, Optional, Optional, Ints, Optional>;

    // ids (T,); wanted (L,) tokens whose logits are, rising; the others as above -> normalised
    // (T, hidden); whether all numbers of each token are finite, as above; logits (L, V) float32;
    // of each row the same; the first of its greatest (L,); the streams that enter the auxiliary
    // layers, as above. A bare result has the last two alone, if all numbers are finite: to make
    // Python's tensors takes as long as all other glue.
    Scores score(
        const Ints &ids, const Ints &logit_indices, Rotaries rotaries, const Ints &positions,
        GroupMetadata rows, StatesMetadata states, bool argmax_only) {
        can_decode_next_ = false;
        TORCH_CHECK(ends_.has_value(), "this stack has no embedding and no head");
        check_ids(ids);
        const int64_t tokens = ids.size(), count = logit_indices.size();
        for (int64_t i = 0, least = 0; i < count; least = logit_indices.data()[i++] + 1)
            TORCH_CHECK_INDEX(
                least <= logit_indices.data()[i] && logit_indices.data()[i] < tokens,
                "logit indices are token indices, ascending");
        take(tokens, std::move(rotaries), positions, std::move(rows), std::move(states));
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
        TORCH_CHECK(tables.size() >= rows_.size() + state_rows_.size(), "a table a cache group");
        for (size_t i = 0; i < rows_.size(); ++i) {
            AttentionMetadata &rows = *rows_[i];
            rows.advance(ints_of(tables[i]));
            const int64_t pages = groups_[i].shape.pages;
            TORCH_CHECK(
                groups_[i].shape.heads == 0 || rows.pages_needed() <= pages, "a row has page ",
                rows.pages_needed() - 1, " of ", pages);
            set_tasks(groups_[i], rows);
        }
        for (size_t i = 0; i < state_rows_.size(); ++i) {
            state_rows_[i]->advance(ints_of(tables[rows_.size() + i]));
            check_states(i);
            state_groups_[i] = state_rows_[i]->plain();
        }
        for (int32_t &position : positions_) ++position;
        ++position_max_;
        Scores scores = compute_scores(ids, argmax_only);
        can_decode_next_ = true;
        return scores;
    }

  private:
    StackBlock keep(const BlockNorms &norms) {
        return {.before = keep(norms[0]), .after = keep(norms[1]), .with = keep(norms[2])};
    }

    StackNorm keep(const MaybeNorm &norm) {
        if (!norm) return {nullptr, nullptr};
        const auto &[weight, bias] = *norm;
        TORCH_CHECK(!bias || norm_ == NormKind::layer, "a norm by root-mean-square has no bias");
        kept_.push_back(weight);
        if (bias) kept_.push_back(*bias);
        return {
            norm_weight(norm_, weight, like_, hidden_),
            bias ? vector_of(*bias, like_, hidden_) : nullptr};
    }

    StackRecurrence keep(const std::optional<Recurrent> &recurrent) {
        if (!recurrent) return {};
        const auto &[layer, in, out, _, conv_states, states, group] = *recurrent;
        TORCH_CHECK(
            layer != nullptr && in != nullptr && out != nullptr && group >= 0,
            "a recurrence has linears, and states of a group");
        const Recurrence &packed = layer->packed();
        TORCH_CHECK(packed.dtype == dtype_, "a recurrence computes in the dtype of the stream");
        check_linear(in->packed(), hidden_, packed.inputs());
        check_linear(out->packed(), packed.width(), hidden_);
        layer->check_states(conv_states, states);
        kept_.push_back(conv_states);
        kept_.push_back(states);
        const auto index = static_cast<size_t>(group);
        if (states_kept_.size() <= index) states_kept_.resize(index + 1, states.size(0));
        states_kept_[index] = std::min(states_kept_[index], states.size(0));
        mixed_ = std::max(mixed_, packed.width());
        projected_ = std::max(projected_, packed.inputs());
        recurrences_.push_back(&packed);
        return {
            &packed,
            in->packed(),
            out->packed(),
            conv_states.mutable_data_ptr(),
            states.mutable_data_ptr<float>(),
            group};
    }

    StackLatent keep(const std::optional<Latent> &latent, const CacheShape &shape) {
        if (!latent) return {};
        const auto
            &[query_down, query_norm, query_eps, query, down, norm, eps, absorb, restore, content,
              position, interleaved] = *latent;
        TORCH_CHECK(
            query != nullptr && down != nullptr && absorb != nullptr && restore != nullptr &&
                (query_down != nullptr) == query_norm.has_value(),
            "latent attention has linears of queries, latents and heads");
        const auto heads = static_cast<int64_t>(absorb->packed().size());
        const PackedLinear &up = *absorb->packed().front(), &back = *restore->packed().front();
        StackLatent kept = {
            .query_down = query_down != nullptr ? query_down->packed() : PackedLinear{},
            .query_norm = nullptr,
            .query = query->packed(),
            .down = down->packed(),
            .norm = nullptr,
            .query_eps = static_cast<float>(query_eps),
            .eps = static_cast<float>(eps),
            .absorb = absorb->packed().data(),
            .restore = restore->packed().data(),
            .heads = heads,
            .content = content,
            .position = position,
            .latent = up.outputs,
            .value = back.outputs,
            .interleaved = interleaved,
        };
        TORCH_CHECK(
            static_cast<int64_t>(restore->packed().size()) == heads && content > 0 &&
                position > 0 && position % 2 == 0,
            "heads have contents and positions");
        check_linear(kept.query, kept.query.inputs, heads * (content + position));
        check_linear(kept.down, hidden_, kept.head_size());
        check_linear(up, content, kept.latent);
        check_linear(back, kept.latent, kept.value);
        TORCH_CHECK(
            shape.heads == 1 && shape.head_size == kept.head_size(),
            "a cache of latents has one head of ", kept.head_size());
        kept.norm = norm_weight(norm_, norm, like_, kept.latent);
        kept_.push_back(norm);
        if (query_down != nullptr) {
            check_linear(kept.query_down, hidden_, kept.query.inputs);
            kept.query_norm = norm_weight(norm_, *query_norm, like_, kept.query.inputs);
            kept_.push_back(*query_norm);
            query_latents_ = std::max(query_latents_, kept.query.inputs);
        } else {
            check_linear(kept.query, hidden_, kept.query.outputs);
        }
        latents_ = std::max(latents_, kept.head_size());
        absorbed_ = std::max(absorbed_, heads * kept.head_size());
        values_ = std::max(values_, heads * kept.value);
        return kept;
    }

    static MixerScales scales_of(const std::pair<double, double> &scales) {
        return {static_cast<float>(scales.first), static_cast<float>(scales.second)};
    }

    void check_states(size_t group) const {
        const int64_t needed = state_rows_[group]->states_needed();
        TORCH_CHECK(
            group >= states_kept_.size() || needed <= states_kept_[group], "a row has state ",
            needed - 1, " of ", states_kept_[group]);
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
    }

    // Note the least head that is rotated so.
    void note_rotary(int64_t rotary, int64_t head_size) {
        const auto index = static_cast<size_t>(rotary);
        if (rotated_heads_.size() <= index) rotated_heads_.resize(index + 1, head_size);
        rotated_heads_[index] = std::min(rotated_heads_[index], head_size);
    }

    void check_ids(const Ints &ids) const {
        for (int64_t i = 0; i < ids.size(); ++i)
            TORCH_CHECK_INDEX(
                0 <= ids.data()[i] && ids.data()[i] < vocabulary_, "token ", ids.data()[i], " of ",
                vocabulary_);
    }

    // Lay out the call of a pass, but for what it overwrites, and keep what it points to.
    void take(
        int64_t tokens, Rotaries rotaries, const Ints &positions, GroupMetadata rows,
        StatesMetadata states) {
        TORCH_CHECK(tokens > 0, "a pass has tokens");
        TORCH_CHECK(positions.size() == tokens, "a position a token");
        take_rotaries(std::move(rotaries));
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
        set_states(std::move(states), tokens);
        positions_.assign(positions.data(), positions.data() + tokens);
        call_ = {
            .dtype = dtype_,
            .layers = layers_.data(),
            .count = static_cast<int64_t>(layers_.size()),
            .hidden = hidden_,
            .tokens = tokens,
            .norm = norm_,
            .eps = eps_,
            .groups = groups_.data(),
            .states = state_groups_.data(),
            .rotaries = rotaries_.data(),
            .positions = positions_.data(),
            .final_norm = final_,
            .pass_cache = pass_cache(),
            .residual = nullptr,
            .out = nullptr,
            .finite = nullptr,
            .ends = nullptr,
            .aux_layers = aux_layers_.data(),
            .aux_count = static_cast<int64_t>(aux_layers_.size()),
            .aux = nullptr,
            .normed = nullptr,
            .added = nullptr,
            .heads = nullptr,
            .mixed = nullptr,
            .gated = nullptr,
            .attended = nullptr,
            .branch = nullptr,
            .scaled = nullptr,
            .projected = nullptr,
            .recurrence_room = nullptr,
            .query_latents = nullptr,
            .latents = nullptr,
            .absorbed = nullptr,
            .values = nullptr,
            .experts_rooms = nullptr,
            .experts_plans = nullptr,
        };
    }

    void take_rotaries(Rotaries rotaries) {
        TORCH_CHECK(
            rotaries.size() >= rotated_heads_.size(), "there is no rotation ",
            rotated_heads_.size() - 1);
        rotaries_.clear();
        known_positions_ = learned_positions_;
        for (size_t i = 0; i < rotated_heads_.size(); ++i) {
            const auto &[cos, sin, query_scale] = rotaries[i];
            const int64_t rotated = rotated_of(cos, rotated_heads_[i]), known = cos.size(0);
            rotaries_.push_back(
                {vector_of(cos, like_, known * rotated), vector_of(sin, like_, known * rotated),
                 rotated, query_scale ? floats_of(*query_scale, known) : nullptr});
            known_positions_ = std::min(known_positions_, known);
        }
        kept_rotaries_ = std::move(rotaries);
    }

    static const float *floats_of(const at::Tensor &tensor, int64_t count) {
        TORCH_CHECK(
            tensor.is_contiguous() && tensor.numel() == count, "a factor of queries a position");
        return tensor.const_data_ptr<float>();
    }

    bool all_one_each() const {
        return std::all_of(
            rows_.begin(), rows_.end(), [](const auto &rows) { return rows->one_each(); });
    }

    // The pass that is laid out, from ids to logits.
    Scores compute_scores(const Ints &ids, bool argmax_only) {
        const int64_t tokens = call_.tokens, count = ends_->count;
        Ints argmax(count);
        call_.out = states_.reserve({tokens, hidden_}, like_.scalar_type());
        ends_->ids = ids.data();
        ends_->logits =
            static_cast<float *>(logits_.reserve({count, ends_->head->outputs}, at::kFloat));
        ends_->argmax = argmax.mutable_data();
        Optional aux = reserve_aux();
        compute();
        Optional finite = flags_of(call_.finite, tokens);
        Optional logits_finite = flags_of(ends_->finite, count);
        if (argmax_only && !finite && !logits_finite) return {{}, {}, {}, {}, argmax, aux};
        return {states_.tensor(),         std::move(finite), logits_.tensor(),
                std::move(logits_finite), std::move(argmax), std::move(aux)};
    }

    // Memory for the streams that enter the auxiliary layers, if there are any.
    Optional reserve_aux() {
        const auto count = static_cast<int64_t>(aux_layers_.size());
        if (count == 0) return std::nullopt;
        at::Tensor aux = at::empty({call_.tokens, count * hidden_}, like_.options());
        call_.aux = aux.mutable_data_ptr();
        return aux;
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
        const Linear *gate_up, const Linear *down, const MixtureOfExperts *experts) const {
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
        const PackedLinear &first = gate_up->packed();
        check_linear(first, hidden_, first.halves ? 2 * last.inputs : last.inputs);
        check_linear(last, last.inputs, hidden_);
    }

    void set_groups(const GroupMetadata &rows, int64_t tokens) {
        TORCH_CHECK(!rows.empty() && !layers_.empty(), "a stack has layers, and rows of groups");
        TORCH_CHECK(
            final_.weight || layers_.back().mlp_norms.with.weight, "a norm follows the last layer");
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
                .one_each = each.one_each(),
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

    void set_states(StatesMetadata states, int64_t tokens) {
        TORCH_CHECK(
            states_kept_.size() <= states.size(), "there are no rows of group of states ",
            states_kept_.size() - 1);
        state_groups_.clear();
        state_rows_ = std::move(states);
        for (size_t i = 0; i < state_rows_.size(); ++i) {
            TORCH_CHECK(state_rows_[i] != nullptr, "None is no rows");
            const StateMetadata &each = *state_rows_[i];
            TORCH_CHECK(
                each.tokens() == tokens, "rows of ", each.tokens(), " tokens, not ", tokens);
            check_states(i);
            state_groups_.push_back(each.plain());
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
                queries_ == shape.heads * shape.queries_per_head * shape.head_size,
            "the cache has another shape than the rows");
        return shape;
    }

    // Keys and values of one layer of the pass that is laid out, where none are kept. What is apart
    // in them follows from a group's shape.
    LayerCache pass_cache() {
        int64_t most = 0;
        for (const StackGroup &group : groups_)
            if (const CacheShape &shape = group.shape; shape.bidirectional)
                most = std::max(most, shape.pages * shape.heads * KvLayout(shape).head_numbers());
        if (most == 0) return {nullptr, nullptr, 1.0f, 1.0f, 0, 0};
        if (!whole_.defined() || whole_.numel() < 2 * most)
            whole_ = at::empty({2 * most}, like_.options());
        auto *keys = static_cast<char *>(whole_.mutable_data_ptr());
        return {keys, keys + most * whole_.element_size(), 1.0f, 1.0f, 0, 0};
    }

    // What the pass that is laid out writes beside its results, in one piece that is kept and
    // grows.
    void make_room(StackEnds *ends) {
        const int64_t row = call_.tokens * like_.element_size();
        void *finite = nullptr, *logits_finite = nullptr, *scans = nullptr, *experts = nullptr;
        void *recurrences = nullptr;
        int64_t recurrence_size = 0;
        for (const Recurrence *each : recurrences_)
            recurrence_size = std::max(recurrence_size, RecurrenceRoom::size(*each, call_.tokens));
        int64_t experts_bytes = 0;  // one layer after the other has the same
        for (const MixtureOfExperts *each : mixtures_)
            if (each) experts_bytes = std::max(experts_bytes, each->room_bytes(call_.tokens));
        std::vector<std::pair<void **, int64_t>> parts = {
            {&call_.normed, row * hidden_},
            {&call_.added, row * hidden_},
            {&call_.heads, row * heads_},
            {&call_.mixed, row * mixed_},
            {&call_.gated, row * width_},
            {&call_.attended, parallel_ ? row * hidden_ : 0},
            {&finite, call_.tokens},
            {&experts, experts_bytes},
            {&call_.branch, both_ ? row * hidden_ : 0},
            {&call_.scaled, scaled_ ? row * hidden_ : 0},
            {&call_.projected, row * projected_},
            {&call_.query_latents, row * query_latents_},
            {&call_.latents, row * latents_},
            {&call_.absorbed, row * absorbed_},
            {&call_.values, row * values_},
            {&recurrences, recurrence_size * static_cast<int64_t>(sizeof(float))},
        };
        if (ends != nullptr) {
            const int64_t size = scan_parts(ends->head->outputs) * sizeof(PartScan);
            parts.emplace_back(&call_.residual, row * hidden_);
            parts.emplace_back(&ends->gathered, ends->count * hidden_ * like_.element_size());
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
        call_.recurrence_room = static_cast<float *>(recurrences);
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
    int64_t hidden_;
    Dtype dtype_;
    at::Tensor like_;  // of no numbers, in the dtype of the model
    float eps_;
    StackNorm final_ = {};
    std::vector<StackLayer> layers_;
    std::vector<std::optional<CacheShape>> shapes_;  // of each cache group's layers
    std::vector<int64_t> rotated_heads_;             // the least head of each rotation
    bool parallel_ = false;                          // whether a layer's blocks are
    bool both_ = false, scaled_ = false;             // whether it has two mixers, and factors
    int64_t heads_ = 0, queries_ = 0, projected_ = 0;
    int64_t query_latents_ = 0, latents_ = 0, absorbed_ = 0, values_ = 0;
    std::vector<const Recurrence *> recurrences_;
    std::vector<int64_t> states_kept_;                // how many each group of states has
    int64_t mixed_ = 0, width_ = 0;                   // the most that goes into out, and into down
    std::vector<const MixtureOfExperts *> mixtures_;  // of each layer, or null
    std::vector<ExpertsRoom> experts_rooms_;          // likewise
    std::vector<ExpertsPlan> experts_plans_;
    std::vector<int64_t> aux_layers_;
    std::vector<at::Tensor> kept_;
    std::vector<QkNormTensors> head_norms_;
    int64_t vocabulary_ = 0;  // tokens that have an embedding

    // The last pass: how it was called, and what that points to.
    StackCall call_ = {};
    std::optional<StackEnds> ends_;
    GroupMetadata rows_;
    std::vector<StackGroup> groups_;
    StatesMetadata state_rows_;
    std::vector<StateRows> state_groups_;
    Rotaries kept_rotaries_;
    std::vector<StackRotary> rotaries_;
    std::vector<int32_t> positions_;
    int64_t learned_positions_ = std::numeric_limits<int64_t>::max();
    int64_t known_positions_ = 0,
            position_max_ = 0;      // positions of all rotations, and the greatest of the pass
    bool can_decode_next_ = false;  // whether `again` may follow

    at::Tensor room_, whole_;
    ReusableTensor states_, logits_;
};

}  // namespace

void bind_stack(py::module_ &module) {
    py::class_<Stack>(module, "Stack")
        .def(
            py::init<Dtype, int64_t, NormKind, const Stack::MaybeNorm &, double>(), py::kw_only(),
            py::arg("dtype"), py::arg("hidden"), py::arg("norm"), py::arg("final_norm"),
            py::arg("eps"))
        .def(
            "add", &Stack::add, py::kw_only(), py::arg("qkv"), py::arg("out"), py::arg("gated"),
            py::arg("attention_scales"), py::arg("recurrent"), py::arg("latent"),
            py::arg("gate_up"), py::arg("down"), py::arg("experts"), py::arg("activation"),
            py::arg("mlp_scales"), py::arg("attention_norms"), py::arg("mlp_norms"),
            py::arg("parallel"), py::arg("multiplier"), py::arg("head_norms"), py::arg("scale"),
            py::arg("softcap"), py::arg("sinks"), py::arg("rotary"), py::arg("group"),
            py::arg("cache"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(),
            py::keep_alive<1, 6>(), py::keep_alive<1, 7>(), py::keep_alive<1, 8>(),
            py::keep_alive<1, 10>(), py::keep_alive<1, 9>())
        .def(
            "set_ends", &Stack::set_ends, py::kw_only(), py::arg("embedding"), py::arg("table"),
            py::arg("scale"), py::arg("positions"), py::arg("head"), py::arg("logits_scale"),
            py::arg("softcap"), py::keep_alive<1, 2>(), py::keep_alive<1, 6>())
        .def("set_aux_layers", &Stack::set_aux_layers)
        .def("forward", &Stack::forward)
        .def("score", &Stack::score)
        .def("decode_next", &Stack::decode_next);
}
