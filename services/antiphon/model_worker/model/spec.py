"""What a family of models declares, and what one model of it looks like."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.kernels.rotary import Rotary
from antiphon.model_worker.model.config_file import ConfigFile

if TYPE_CHECKING:
    import torch


class Biases(msgspec.Struct, frozen=True, kw_only=True):
    """Which linears of a layer have a bias."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False


class WeightNames(msgspec.Struct, frozen=True, kw_only=True):
    """What the checkpoint calls each tensor; those of a layer follow the layer's own name."""

    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    final_norm: str = "model.norm"
    layer: str = "model.layers.{}"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    out: str = "self_attn.o_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Endings of tensors that old checkpoints carry and that are computed here."""


Windows = tuple[int | None, ...]


def full_attention(config: ConfigFile) -> Windows:
    """Every layer sees every token."""
    return (None,) * config.num_hidden_layers


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What models of one family share; the sizes come from each model's config.json.

    Attributes:
        norm: Before each block and at the end.
        activation: Of the gate in the feed-forward block.
        rotary: Which pairs of a head are rotated together.
        windows: How far each layer looks back; None is all the way.
        biases: Which linears have a bias.
        names: What the checkpoint calls its tensors.
    """

    name: str
    norm: Literal["rmsnorm"] = "rmsnorm"
    activation: Literal["silu"] = "silu"
    rotary: Literal["halves"] = "halves"
    windows: Callable[[ConfigFile], Windows] = full_attention
    biases: Callable[[ConfigFile], Biases]
    names: WeightNames = WeightNames()


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One model's shape: everything that building its decoder needs."""

    family: str
    vocabulary: int
    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    mlp_width: int
    norm_eps: float
    context_tokens: int
    tied: bool
    biases: Biases
    windows: Windows
    rotary: Rotary
    names: WeightNames

    def kv_groups(self) -> tuple[tuple[int | None, tuple[int, ...]], ...]:
        """Layers that keep the same tokens, as (window, layers), full attention first.

        A group of layers shares page tables: entry g here is `page_tables[g]` of a plan.
        """
        windows = sorted(set(self.windows), key=lambda window: (window is not None, window or 0))
        return tuple(
            (window, tuple(i for i, own in enumerate(self.windows) if own == window))
            for window in windows
        )

    def kv_heads_of(self, ranks: int) -> int:
        """Key-value heads on one of `ranks` ranks; with fewer heads than ranks they are copied."""
        return max(1, self.kv_heads // ranks)

    def kv_bytes(self, layers: int, ranks: int, dtype: torch.dtype) -> int:
        """Keys and values of one token in `layers` layers, on one rank."""
        return 2 * layers * self.kv_heads_of(ranks) * self.head_size * dtype.itemsize


def read_spec(family: Family, config: ConfigFile) -> ModelSpec:
    """The shape of the model that `config` describes.

    Raises:
        ModelLoadError: The config asks for something that this family does not have.
    """
    config.check(activation=family.activation)
    return ModelSpec(
        family=family.name,
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        query_heads=config.num_attention_heads,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        mlp_width=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        context_tokens=config.max_position_embeddings,
        tied=config.tie_word_embeddings,
        biases=family.biases(config),
        windows=family.windows(config),
        rotary=config.rotary(),
        names=family.names,
    )
