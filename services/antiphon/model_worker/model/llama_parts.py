"""Llama's building blocks, read from a config; most families share them.

A family uses these and replaces what differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from antiphon.layers.attention import AttentionSpec
from antiphon.layers.mlp import GatedMlpSpec
from antiphon.layers.norm import NormSpec
from antiphon.model_card.tasks import unused_prefixes
from antiphon.model_worker.model.spec import HeadSpec, ModelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import LayerSpec, ModelFamily

Kind = TypeVar("Kind", bound="Hashable")


def attention(config: ConfigFile, *, window: int | None = None) -> AttentionSpec:
    """Grouped-query attention with RoPE, without biases."""
    kind = "full_attention" if window is None else "sliding_attention"
    return AttentionSpec(
        query_heads=config.num_attention_heads,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        scale=config.head_size**-0.5,
        rotary=config.rotary(kind),
        window=window,
    )


def gated(config: ConfigFile) -> GatedMlpSpec:
    """A gated feed-forward block without biases."""
    return GatedMlpSpec(width=config.width, activation=config.activation)


def rms_norm(config: ConfigFile) -> NormSpec:
    """RMSNorm with the config's epsilon."""
    return NormSpec(eps=config.rms_norm_eps)


def layers(kinds: Sequence[Kind], layer: Callable[[Kind], LayerSpec]) -> tuple[LayerSpec, ...]:
    """A layer of each kind, in order; layers of one kind share their spec."""
    specs = {kind: layer(kind) for kind in dict.fromkeys(kinds)}
    return tuple(specs[kind] for kind in kinds)


def model(
    family: str, config: ConfigFile, layers: tuple[LayerSpec, ...], norm: NormSpec
) -> ModelSpec:
    """A model of layers between an embedding and a head (tied or not), with a final norm."""
    return ModelSpec(
        family=family,
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        layers=layers,
        context_tokens=config.context_tokens,
        norm=norm,
        head=HeadSpec(tied=config.tie_word_embeddings),
        passed_over=unused_prefixes(config.architectures[0]),
    )


def read_spec(family: ModelFamily, config: ConfigFile) -> ModelSpec:
    """The spec of the model that `config` describes.

    Raises:
        ModelLoadError: The config needs a feature that this family does not support.
    """
    config.check()
    return family.declare(config)
