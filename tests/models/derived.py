"""What a model has that a plain Llama has not, read from its spec, and the model without it.

Nobody has to name the features of a row: every field of a spec is either a size or a name
(`NEUTRAL`), or a switch with a rule in `RULES` that says which feature a value is, and what the
field is without it. A field that is in neither fails the test.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from antiphon.kernels.rotary import LongScaling, RotarySpec
from antiphon.kernels.routing import RoutingSpec
from antiphon.layers.alternating_updates import AlternatingUpdatesSpec
from antiphon.layers.attention import AttentionSpec
from antiphon.layers.classification_head import ClassificationHeadSpec, DenseSpec
from antiphon.layers.cross_attention import CrossAttentionSpec
from antiphon.layers.laurel import LaurelSpec
from antiphon.layers.mla import LatentSpec
from antiphon.layers.mlp import GatedMlpSpec, PlainMlpSpec
from antiphon.layers.moe import ClampedSwish, ExpertsSpec, MoeSpec
from antiphon.layers.norm import NormSpec
from antiphon.layers.parallel_mixers import MixerBranch, ParallelMixersSpec
from antiphon.layers.per_layer_embedding import PerLayerInputSpec
from antiphon.layers.recurrent import GatedDeltaSpec, Mamba2Spec
from antiphon.model_worker.model.spec import (
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    ModelSpec,
    Norms,
)

Mutant = Callable[[ModelSpec], ModelSpec]
Found = Iterator[tuple[str, object]]
"""Features, each with what the field is without it."""
Rule = Callable[[Any], Found]
"""Of the part that has the field."""


def derived(spec: ModelSpec) -> dict[str, Mutant]:
    """By feature, the model without it."""
    named = dict.fromkeys(feature for _, _, feature, _ in _found(spec))
    return {feature: _without(feature) for feature in named}


def unclassified(spec: ModelSpec) -> set[str]:
    """Fields without a known meaning."""
    return {
        f"{type(part).__name__}.{name}"
        for part in _parts(spec)
        for name, value in _fields(part).items()
        if name not in NEUTRAL.get(type(part), ())
        and name not in RULES.get(type(part), {})
        and not _is_part(value)
    }


def _without(feature: str) -> Mutant:
    def mutant(spec: ModelSpec) -> ModelSpec:
        # By identity: equal parts may lie in different places, but are changed alike.
        plain: dict[int, dict[str, object]] = {}
        for part, name, found, value in _found(spec):
            if found == feature:
                plain.setdefault(id(part), {})[name] = value
        return _rebuilt(spec, plain)

    return mutant


def _found(spec: ModelSpec) -> Iterator[tuple[object, str, str, object]]:
    """Each feature of each part: the part, the field, the feature, the field without it."""
    for part in _parts(spec):
        for name, rule in RULES.get(type(part), {}).items():
            for feature, plain in rule(part):
                yield part, name, feature, plain


def _parts(part: object) -> Iterator[object]:
    """A part and all parts in it."""
    yield part
    for name, value in _fields(part).items():
        if name not in NEUTRAL.get(type(part), ()):
            for inner in value if isinstance(value, tuple) else (value,):
                if _is_part(inner):
                    yield from _parts(inner)


def _rebuilt(part: Any, plain: Mapping[int, Mapping[str, object]]) -> Any:
    changes: dict[str, object] = {}
    for name, value in _fields(part).items():
        if name in NEUTRAL.get(type(part), ()):
            continue
        if isinstance(value, tuple) and _is_part(value):
            changes[name] = tuple(_rebuilt(inner, plain) for inner in value)
        elif _is_part(value):
            changes[name] = _rebuilt(value, plain)
    changes.update(plain.get(id(part), {}))
    if isinstance(part, msgspec.Struct):
        return msgspec.structs.replace(part, **changes)
    return dataclasses.replace(part, **changes)


def _is_part(value: object) -> bool:
    """Whether it is a spec, or several."""
    if isinstance(value, tuple):
        return bool(value) and all(map(_is_part, value))
    return type(value) in NEUTRAL


def _fields(part: Any) -> dict[str, object]:
    if isinstance(part, msgspec.Struct):
        return msgspec.structs.asdict(part)
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}


def _off(name: str, feature: str, plain: object) -> Rule:
    """A field that has one plain value."""

    def rule(part: Any) -> Found:
        if getattr(part, name) != plain:
            yield feature, plain

    return rule


_ACTIVATIONS = {
    "gelu": ("exact GELU", "gelu_tanh"),
    "gelu_tanh": ("tanh GELU", "gelu"),
    "quick_gelu": ("quick GELU", "gelu"),
    "relu": ("ReLU", "gelu"),
    "relu_squared": ("squared ReLU", "relu"),
    "tanh": ("tanh", "relu"),
}


def _activation(part: Any) -> Found:
    if part.activation in _ACTIVATIONS:
        yield _ACTIVATIONS[part.activation]


def _dense_activation(part: DenseSpec) -> Found:
    if part.activation in _ACTIVATIONS:
        yield "activation of the dense layer", _ACTIVATIONS[part.activation][1]


def _scale(part: AttentionSpec) -> Found:
    plain = part.head_size**-0.5
    if not math.isclose(part.scale, plain):
        yield "attention scale", plain


def _latent_scale(part: LatentSpec) -> Found:
    plain = (part.sizes.content + part.sizes.position) ** -0.5
    if not math.isclose(part.scale, plain):
        yield "mscale", plain


def _rotary(part: AttentionSpec | LatentSpec) -> Found:
    if (rotary := part.rotary) is None:
        return
    if rotary.scaling is not None:
        yield "rope scaling", dataclasses.replace(rotary, scaling=None)
    if isinstance(part, AttentionSpec) and rotary.size < part.head_size:
        scaling = rotary.scaling
        if isinstance(scaling, LongScaling):  # it has a factor for each pair
            factors = (scaling.factors * part.head_size)[: part.head_size // 2]
            scaling = dataclasses.replace(scaling, factors=factors)
        whole = dataclasses.replace(rotary, size=part.head_size, scaling=scaling)
        yield "partial RoPE", whole


def _window(part: AttentionSpec) -> Found:
    if part.window is not None and not part.chunked:
        yield "window", None


def _routed(part: RoutingSpec) -> Found:
    if part.top_k > 1:
        feature = "normalised top-k weights" if part.renormalised else "unnormalised top-k weights"
        yield feature, not part.renormalised


def _shared_gate(part: MoeSpec) -> Found:
    if part.shared_gate is not None:
        yield "shared gate", None
        yield "shared expert", None


def _names_of_experts(part: ExpertsSpec) -> Found:
    if getattr(part.names, "interleaved", False):
        yield "interleaved gate and up", dataclasses.replace(part.names, interleaved=False)


def _gate_first(part: Mamba2Spec) -> Found:
    if part.norm_eps is not None:
        feature = "gate before the norm" if part.gate_first else "gate behind the norm"
        yield feature, not part.gate_first


def _kind(part: NormSpec) -> Found:
    if part.kind == "rms_one_plus":
        yield "norms of 1 + weight", "rms_wide"
    if part.kind == "layer":
        yield "layer norms", "rms_wide"


def _norms(part: LayerSpec) -> Found:
    norms = part.norms
    after, stream = norms.after_mixer, norms.with_mixer
    if after is not None:
        feature = "sandwich norms" if norms.before_mixer else "output norms only"
        yield feature, _norms_without(norms, "after")
    if stream is not None:
        yield "post-norms", _norms_without(norms, "with")
    if norms.after_first is not None:
        both = msgspec.structs.replace(norms, after_first=None, after_second=None)
        yield "norms of two feed-forward blocks", both


def _norms_without(norms: Norms, where: str) -> Norms:
    absent = {f"{where}_mixer": None, f"{where}_feed_forward": None}
    return msgspec.structs.replace(norms, **absent)


def _layers(part: ModelSpec) -> Found:
    """What only shows beside other layers."""
    ways = {getattr(layer.mixer, "rotary", None) for layer in part.layers}
    mixers = [layer.mixer for layer in part.layers if isinstance(layer.mixer, AttentionSpec)]
    far = next((mixer.rotary for mixer in mixers if mixer.window is None and mixer.rotary), None)
    turned = {way for way in ways if way is not None}
    if len(turned) > 1:
        assert far is not None, "the rotation of the layers without windows"
        yield "local RoPE", _all_rotated(part, far)
    # A recurrent layer has nothing to rotate.
    if turned and any(mixer.rotary is None for mixer in mixers):
        yield "NoPE layers", _all_rotated(part, next(iter(turned)))
    if any(mixer.kv_layer is not None for mixer in mixers):
        yield "keys and values of another layer", _all_of_the_first(part)


def _all_rotated(spec: ModelSpec, rotary: RotarySpec) -> tuple[LayerSpec, ...]:
    """By this rotation, as far as heads reach."""

    def turned(mixer: AttentionSpec) -> AttentionSpec:
        size = min(rotary.size, mixer.head_size)
        return dataclasses.replace(mixer, rotary=dataclasses.replace(rotary, size=size))

    return _attending(spec, turned)


def _all_of_the_first(spec: ModelSpec) -> tuple[LayerSpec, ...]:
    """Layers without keys and values share those of the first layer whose cache is alike."""
    first: dict[object, int] = {}
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mixer, AttentionSpec):
            first.setdefault(layer.mixer.cache, index)

    def shared(mixer: AttentionSpec) -> AttentionSpec:
        if mixer.kv_layer is None:
            return mixer
        return dataclasses.replace(mixer, kv_layer=first[mixer.cache])

    return _attending(spec, shared)


def _attending(
    spec: ModelSpec, change: Callable[[AttentionSpec], AttentionSpec]
) -> tuple[LayerSpec, ...]:
    """The layers, those with attention changed."""
    return tuple(
        msgspec.structs.replace(layer, mixer=change(layer.mixer))
        if isinstance(layer.mixer, AttentionSpec)
        else layer
        for layer in spec.layers
    )


def _pooling(part: ModelSpec) -> Found:
    features = {"last": "last token", "cls": "first token", "mean": "mean of tokens"}
    if isinstance(part.head, ClassificationHeadSpec):
        yield features[part.pooling], "last" if part.pooling == "cls" else "cls"


def _context(part: ModelSpec) -> Found:
    """The table of positions has rows before the first."""
    if first := part.embedding.positions_first:
        yield "positions after padding", part.context_tokens + first


def _branches(part: ParallelMixersSpec) -> Found:
    """Attention alone."""
    yield "state", tuple(each for each in part.branches if isinstance(each.mixer, AttentionSpec))


def _nothing(_: object) -> Found:
    """Of a part that may be absent, which is no switch."""
    return iter(())


def _biases(*names: str) -> Mapping[str, Rule]:
    return {name: _off(name, "biases", plain=False) for name in names}


RULES: Mapping[type, Mapping[str, Rule]] = {
    ModelSpec: {
        "layers": _layers,
        "pooling": _pooling,
        "head": _nothing,
        "context_tokens": _context,
        "streams": _off("streams", "alternating updates", None),
    },
    EmbeddingSpec: {
        "scale": _off("scale", "scaled embedding", 1.0),
        "positions": _off("positions", "learned positions", None),
        "positions_first": _off("positions_first", "positions after padding", 0),
        "types": _off("types", "token types", None),
        "norm": _off("norm", "norm of the embedding", None),
    },
    HeadSpec: {
        "bias": _off("bias", "biased head", plain=False),
        "scale": _off("scale", "scaled logits", 1.0),
        "softcap": _off("softcap", "capped logits", None),
    },
    ClassificationHeadSpec: {
        "bias": _off("bias", "biased head", plain=False),
        "dense": _off("dense", "dense layer", None),
    },
    DenseSpec: {
        "activation": _dense_activation,
        "norm": _off("norm", "norm of the dense layer", None),
        **_biases("bias"),
    },
    LayerSpec: {
        "norms": _norms,
        "feed_forward": _nothing,
        "second": _off("second", "experts beside a block", None),
        "cross": _off("cross", "cross attention", None),
        "parallel": _off("parallel", "parallel blocks", plain=False),
        "multiplier": _off("multiplier", "residual multiplier", 1.0),
        "per_layer_input": _off("per_layer_input", "per-layer embeddings", None),
        "scalar": _off("scalar", "scaled layers", None),
        "laurel": _off("laurel", "learned residuals", None),
        "updates": _off("updates", "alternating updates", None),
    },
    AlternatingUpdatesSpec: {
        "active": _off("active", "another active stream", 0),
    },
    NormSpec: {"kind": _kind},
    AttentionSpec: {
        "scale": _scale,
        "rotary": _rotary,
        "causal": _off("causal", "bidirectional attention", plain=True),
        "interleaved_rope": _off("interleaved_rope", "interleaved RoPE", plain=False),
        "window": _window,
        "chunked": _off("chunked", "chunked attention", plain=False),
        "temperature": _off("temperature", "temperature", None),
        "qk_norm": _off("qk_norm", "qk-norm", None),
        "value_norm": _off("value_norm", "norms of values", None),
        "softcap": _off("softcap", "capped scores", None),
        "sinks": _off("sinks", "sinks", plain=False),
        "gated": _off("gated", "gated attention", plain=False),
        "key_bias": _off("key_bias", "keys without bias", plain=True),
        **_biases("qkv_bias", "out_bias"),
    },
    LatentSpec: {
        "scale": _latent_scale,
        "rotary": _rotary,
        "interleaved_rope": _off("interleaved_rope", "interleaved RoPE", plain=False),
        **_biases("bias"),
    },
    ParallelMixersSpec: {"branches": _branches},
    MixerBranch: {
        "scale_in": _off("scale_in", "scaled branches", 1.0),
        "scale_out": _off("scale_out", "scaled branches", 1.0),
    },
    Mamba2Spec: {
        "norm_eps": _off("norm_eps", "gated norm", None),
        "gate_first": _gate_first,
        "step_limits": _off("step_limits", "step limits", (0.0, math.inf)),
        "scales": _off("scales", "scaled inputs", (1.0,) * 5),
        **_biases("conv_bias", "input_bias", "out_bias"),
    },
    GatedDeltaSpec: {"norm_eps": _off("norm_eps", "gated norm", 1.0)},
    GatedMlpSpec: {
        "activation": _activation,
        "scale_gate": _off("scale_gate", "scaled feed-forward", 1.0),
        "scale_out": _off("scale_out", "scaled feed-forward", 1.0),
        "sparsity": _off("sparsity", "sparse gates", 0.0),
        **_biases("bias"),
    },
    PlainMlpSpec: {"activation": _activation, **_biases("bias")},
    PerLayerInputSpec: {"activation": _activation},
    MoeSpec: {
        "router_bias": _off("router_bias", "router bias", plain=False),
        "correction": _off("correction", "correction", None),
        "router_norm": _off("router_norm", "norm of the router", None),
        "router_scale": _off("router_scale", "scaled router", None),
        "expert_scale": _off("expert_scale", "scaled experts", None),
        "experts_norm": _off("experts_norm", "norm of the experts", None),
        "shared": _off("shared", "shared expert", None),
        "shared_gate": _shared_gate,
    },
    RoutingSpec: {
        "scoring": _off("scoring", "sigmoid scores", "softmax"),
        "renormalised": _routed,
        "factor": _off("factor", "scaling", 1.0),
        "groups": _off("groups", "groups", 1),
        "groups_kept": _off("groups_kept", "groups", 1),
        "group_best": _off("group_best", "groups by their two best", 1),
    },
    ExpertsSpec: {
        "names": _names_of_experts,
        "activation": _activation,
        "bias": _off("bias", "expert biases", plain=False),
        "apply_router_weight_on_input": _off(
            "apply_router_weight_on_input", "router weight on the input", plain=False
        ),
    },
    ClampedSwish: {
        "limit": _off("limit", "clamped gate", 1e9),
        "alpha": _off("alpha", "gate alpha", 1.0),
    },
}
"""Fields that switch something on."""

NEUTRAL: Mapping[type, frozenset[str]] = {
    kind: frozenset(fields.split())
    for kind, fields in {
        ModelSpec: "vocabulary hidden norm_name layer_name ignored prefix"
        " old_endings passed_over further_layers draft_head per_layer_embedding",
        EmbeddingSpec: "name types_count norm_name",
        HeadSpec: "name tied",
        ClassificationHeadSpec: "labels name",
        DenseSpec: "name norm_name",
        LayerSpec: "norms",
        # What has no weight, or another shape of it, could not be loaded otherwise.
        NormSpec: "eps affine bias",
        AttentionSpec: "query_heads kv_heads head_size names qk_norm_over rotary inputs kv_layer"
        " image_ahead",
        CrossAttentionSpec: "heads head_size scale source_tokens query key value out",
        LatentSpec: "sizes query_latent rotary",
        ParallelMixersSpec: "",
        MixerBranch: "",
        Mamba2Spec: "heads head_size groups state_size taps",
        GatedDeltaSpec: "key_heads value_heads key_size value_size taps separate",
        GatedMlpSpec: "width gate up down",
        PlainMlpSpec: "width up down transposed",
        PerLayerInputSpec: "size gate projection norm_name",
        LaurelSpec: "rank left right norm_name",
        AlternatingUpdatesSpec: "streams scale router norm_name prediction correction",
        MoeSpec: "router router_factor experts_norm_name",
        RoutingSpec: "top_k",
        ExpertsSpec: "count width names",
        ClampedSwish: "",
    }.items()
}
"""Fields that are sizes, and names and shapes of a checkpoint's tensors."""
