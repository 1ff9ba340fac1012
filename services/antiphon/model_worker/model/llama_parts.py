"""Llama's building blocks, read from a config; most families share them.

A family sets what differs as `changes`: fields of the spec that a function returns.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from operator import gt
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from msgspec import Meta

from antiphon.kernels.routing import RoutingSpec
from antiphon.layers.attention import AttentionSpec
from antiphon.layers.classification_head import ClassificationHeadSpec, DenseSpec
from antiphon.layers.mlp import GatedMlpSpec, PlainMlpSpec
from antiphon.layers.moe import ExpertsSpec
from antiphon.layers.norm import NormSpec
from antiphon.model_card.config_json import unused_prefixes
from antiphon.model_worker.batching.positions import AXES
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.spec import HeadSpec, LayerSpec, ModelFamily, ModelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from antiphon.kernels.rotary import RotarySpec
    from antiphon.model_worker.model.config_file import ConfigFile

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Kind = TypeVar("Kind", bound="Hashable")


def attention(
    config: ConfigFile, *, window: int | None = None, bias: bool = False, **changes: object
) -> AttentionSpec:
    """Grouped-query attention with RoPE; `bias` is that of all four linears."""
    kind = "full_attention" if window is None else "sliding_attention"
    spec = AttentionSpec(
        query_heads=config.num_attention_heads,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        scale=config.head_size**-0.5,
        rotary=config.rotary(kind),
        window=window,
        qkv_bias=bias,
        out_bias=bias,
    )
    return replace(spec, **changes)


def rotary_with_axes(config: ConfigFile, *, interleaved: bool = False) -> RotarySpec:
    """RoPE whose pairs go by the positions along axes, in sections or by turns."""
    sections, rotary = config.rope.mrope_section, config.rotary()
    pairs = rotary.size // 2
    if len(sections) != AXES or sum(sections) != pairs or min(sections) < 0:
        raise ModelLoadError(
            f"config.json: mrope_section = {list(sections)}: must be {AXES} numbers of pairs,"
            f" together {pairs}"
        )
    most = [(pairs - axis + AXES - 1) // AXES for axis in range(AXES)]
    if interleaved and any(map(gt, sections[1:], most[1:])):
        raise ModelLoadError(
            f"config.json: mrope_section = {list(sections)}: pairs alternate between the axes, so"
            f" that rows have at most {most[1]}, and columns {most[2]}"
        )
    return replace(rotary, sections=sections, interleaved=interleaved)


def gated(config: ConfigFile, **changes: object) -> GatedMlpSpec:
    """A gated feed-forward block without biases."""
    return replace(GatedMlpSpec(width=config.width, activation=config.activation), **changes)


def plain(config: ConfigFile, **changes: object) -> PlainMlpSpec:
    """A feed-forward block of two linears with biases."""
    spec = PlainMlpSpec(width=config.width, activation=config.activation, bias=True)
    return replace(spec, **changes)


def rms_norm(config: ConfigFile) -> NormSpec:
    return NormSpec(eps=config.rms_norm_eps)


def one_plus_norm(config: ConfigFile) -> NormSpec:
    """RMSNorm whose factors are 1 + weight."""
    return NormSpec(kind="rms_one_plus", eps=config.rms_norm_eps)


def layer_norm(config: ConfigFile) -> NormSpec:
    return NormSpec(kind="layer", eps=config.layer_norm_eps, bias=True)


class ExpertFields(msgspec.Struct, frozen=True, kw_only=True):
    """The config fields of every mixture of experts."""

    num_experts: Count
    num_experts_per_tok: Count

    def routing(self, groups: int = 1, groups_kept: int = 1, **changes: object) -> RoutingSpec:
        """Routing by a softmax over all experts.

        Raises:
            ModelLoadError: No such selection is possible; names the numbers.
        """
        experts, chosen = self.num_experts, self.num_experts_per_tok
        if (
            experts % groups
            or not 0 < groups_kept <= groups
            or not 0 < chosen <= experts // groups * groups_kept
        ):
            raise ModelLoadError(
                f"config.json: no {chosen} of {experts} experts can be chosen"
                f" within {groups_kept} of {groups} groups"
            )
        spec = RoutingSpec(top_k=chosen, groups=groups, groups_kept=groups_kept)
        return replace(spec, **changes)

    def experts(self, config: ConfigFile, width: int, **changes: object) -> ExpertsSpec:
        spec = ExpertsSpec(count=self.num_experts, width=width, activation=config.activation)
        return replace(spec, **changes)


def layers(kinds: Sequence[Kind], layer: Callable[[Kind], LayerSpec]) -> tuple[LayerSpec, ...]:
    """A layer of each kind, in order; layers of one kind share their spec."""
    specs = {kind: layer(kind) for kind in dict.fromkeys(kinds)}
    return tuple(specs[kind] for kind in kinds)


def model(
    config: ConfigFile, layers: LayerSpec | tuple[LayerSpec, ...], **changes: object
) -> ModelSpec:
    """A model of layers, or of equal layers, between an embedding and a head (tied or not).

    Its final norm is of the kind of the layers' norms.
    """
    if isinstance(layers, LayerSpec):
        layers = (layers,) * config.num_hidden_layers
    spec = ModelSpec(
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        layers=layers,
        context_tokens=config.context_tokens,
        norm=layers[0].norm,
        head=HeadSpec(tied=config.tie_word_embeddings),
        passed_over=unused_prefixes(config.architectures[0]),
    )
    return msgspec.structs.replace(spec, **changes)


def read_spec(family: ModelFamily, config: ConfigFile) -> ModelSpec:
    """The spec of the model that `config` describes."""
    config.check()
    return family.declare(config)


def classifier(family: ModelFamily) -> ModelFamily:
    """A family's models with a linear head that scores labels from the last token."""
    return _headed(family, lambda config: ClassificationHeadSpec(labels=config.labels))


def reward_model(family: ModelFamily) -> ModelFamily:
    """A family's models with two linears that compute a reward from the last token."""
    dense = DenseSpec(name="score.0", activation="relu")
    head = ClassificationHeadSpec(labels=1, name="score.2", bias=True, dense=dense)
    return _headed(family, lambda _: head)


def embedding_model(family: ModelFamily) -> ModelFamily:
    """A family's models without a head."""
    return _headed(family, lambda _: None)


def _headed(
    family: ModelFamily, head: Callable[[ConfigFile], ClassificationHeadSpec | None]
) -> ModelFamily:
    @wraps(family.declare)
    def declare(config: ConfigFile) -> ModelSpec:
        spec = family.declare(config)
        # Checkpoints of a model saved without a head lack the `model.` prefix.
        pooling = "last" if spec.causal else "mean"
        return msgspec.structs.replace(spec, head=head(config), pooling=pooling, prefix="model.")

    return ModelFamily(family.name, declare)
