"""The declaration of a model by its family. The decoder is built from this alone.

A `ModelSpec` is a tuple of `LayerSpec`s between an embedding and a head. A layer is a mixer
(attention or a recurrence), a feed-forward block, the norms around both, and the way their outputs
are added to the residual stream.

Mixers and feed-forward blocks are tagged kinds: each is a frozen spec, a member of the union
`MixerSpec` or `FeedForwardSpec` below, and is in `antiphon.layers` beside the block that computes
it. To add a kind:

1. In a new file of `antiphon.layers`, write a frozen dataclass with what differs between models
   (sizes, switches, and the checkpoint's names, each relative to its layer) and a class built as
   `Block(site, spec)` with the methods of `layers.sublayer.Sublayer`. The `ForwardContext` gives it
   what it needs of a forward pass.
2. Add the spec to the union here, and the line `NewSpec: NewBlock` to `SUBLAYERS` in
   `decoder_layer`.
3. The spec of a mixer declares with `cache` what it caches. Layers with equal
   `cache` share a cache group. A new kind of cache is one more member of `CacheSpec`.
4. Give a family that has it its row in `tests/models/families.py`, and each switch of the spec its
   rule in `tests/models/derived.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.kernels.attention import NoCache
from antiphon.kernels.kv import KvSpec
from antiphon.kernels.latent import LatentSizes
from antiphon.kernels.recurrent import StateSpec
from antiphon.layers.alternating_updates import AlternatingUpdatesSpec, StreamsSpec
from antiphon.layers.attention import AttentionSpec
from antiphon.layers.classification_head import ClassificationHeadSpec
from antiphon.layers.cross_attention import CrossAttentionSpec
from antiphon.layers.laurel import LaurelSpec
from antiphon.layers.mla import LatentSpec
from antiphon.layers.mlp import GatedMlpSpec, PlainMlpSpec
from antiphon.layers.moe import MoeSpec
from antiphon.layers.norm import NormSpec
from antiphon.layers.parallel_mixers import BranchSpec, ParallelMixersSpec
from antiphon.layers.per_layer_embedding import PerLayerEmbeddingSpec, PerLayerInputSpec
from antiphon.layers.recurrent import GatedDeltaSpec, Mamba2Spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.model.config_file import ConfigFile

MixerSpec = AttentionSpec | LatentSpec | Mamba2Spec | GatedDeltaSpec | ParallelMixersSpec
"""The part of a layer in which tokens attend to, or depend on, each other."""
FeedForwardSpec = GatedMlpSpec | PlainMlpSpec | MoeSpec
"""The part of a layer that transforms each token independently."""
CacheSpec = KvSpec | LatentSizes | StateSpec | NoCache
"""What a mixer caches: something for each token, a state for each sequence, or nothing."""
Pooling = Literal["last", "cls", "mean"]
"""How a text becomes one vector: that of its last token, of its first, or their mean."""


class Norms(msgspec.Struct, frozen=True, kw_only=True):
    """The norms of a layer, by their names in the checkpoint relative to the layer; None: no norm.

    Attributes:
        after_mixer, after_feed_forward: Of the block's output, before it is added to the stream.
        with_mixer, with_feed_forward: Of the stream, after the block's output was added.
        after_first, after_second: Of the outputs of two feed-forward blocks, before they are added
            to each other.
        before_cross: Before cross attention.
    """

    before_mixer: str | None = None
    before_cross: str | None = None
    after_mixer: str | None = None
    before_feed_forward: str | None = None
    after_feed_forward: str | None = None
    with_mixer: str | None = None
    with_feed_forward: str | None = None
    after_first: str | None = None
    after_second: str | None = None


PRE = Norms(before_mixer="input_layernorm", before_feed_forward="post_attention_layernorm")
"""Pre-norm: both blocks read the normalised stream."""
POST = Norms(
    after_mixer="post_attention_layernorm", after_feed_forward="post_feedforward_layernorm"
)
"""Norms of the blocks' outputs only; both blocks read the stream itself."""
SANDWICH = Norms(
    before_mixer="input_layernorm",
    after_mixer="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)
"""Norms before and after both blocks."""


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One layer.

    Attributes:
        cross: Attention to another sequence, between the mixer and the feed-forward block.
        feed_forward: None: the layer has a mixer only.
        second: A second feed-forward block, which reads the stream itself, and whose output is
            added to that of the first.
        norm: The kind of all its norms.
        norms: Which norms it has.
        parallel: Both blocks read the stream that enters the layer; without a norm of its own the
            feed-forward block reads what the mixer reads.
        multiplier: The output of each block is multiplied by this before it is added.
        per_layer_input: What it adds to the stream behind its blocks, of its own input.
        scalar: Name of a learned number by which the stream is multiplied behind all that; None:
            there is none.
        laurel: A learned residual beside the mixer, joined with the stream before the feed-forward
            block.
        updates: It predicts and corrects several streams, of which all else here computes one;
            None: there is one.
    """

    mixer: MixerSpec
    feed_forward: FeedForwardSpec | None
    second: FeedForwardSpec | None = None
    cross: CrossAttentionSpec | None = None
    norm: NormSpec
    norms: Norms = PRE
    parallel: bool = False
    multiplier: float = 1.0
    per_layer_input: PerLayerInputSpec | None = None
    scalar: str | None = None
    laurel: LaurelSpec | None = None
    updates: AlternatingUpdatesSpec | None = None

    @property
    def mixers(self) -> tuple[BranchSpec | LatentSpec, ...]:
        """Its mixer, or its parallel mixers."""
        if isinstance(self.mixer, ParallelMixersSpec):
            return tuple(branch.mixer for branch in self.mixer.branches)
        return (self.mixer,)


class EmbeddingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens become the residual stream.

    Attributes:
        scale: The embedding is multiplied by this.
        positions: Name of the table of learned position embeddings, one for each position.
        positions_first: Rows of that table before the first position.
        types: Name of the table of token-type embeddings.
        types_count: Rows of that table.
        norm: Of the sum of all these; None: no norm. Its name is `norm_name`.
    """

    name: str = "model.embed_tokens"
    scale: float = 1.0
    positions: str | None = None
    positions_first: int = 0
    types: str | None = None
    types_count: int = 0
    norm: NormSpec | None = None
    norm_name: str = ""


class HeadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How the normalised stream becomes logits.

    Attributes:
        tied: Whether the head is the embedding table.
        scale: Logits are multiplied by this.
        softcap: Logits become softcap * tanh(logit / softcap).
    """

    name: str = "lm_head"
    tied: bool
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None


class DraftHeadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a draft head reads of the model that it drafts for, and what it can draft.

    Attributes:
        target_hidden: Hidden size of that model.
        aux_layers: The layers of that model whose inputs it reads, ascending; None: the second,
            one in the middle and one near the end, by `aux_layers_of`.
        aux_count: Number of these layers.
        vocabulary: Number of tokens that it can draft.
    """

    target_hidden: int
    aux_layers: tuple[int, ...] | None
    aux_count: int
    vocabulary: int

    def aux_layers_of(self, layers: int) -> tuple[int, ...]:
        """The layers whose inputs it reads of a model of so many."""
        return self.aux_layers or (2, layers // 2, layers - 3)


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One model: everything that is needed to build its decoder.

    Attributes:
        norm: After the last layer; its name is `norm_name`. Without a name there is none.
        head: Computes logits, or class scores of whole texts; None: the output is the stream.
        pooling: Default pooling of a text into one vector; always used for class scores.
        layer_name: Name of a layer in the checkpoint, with `{}` for its index.
        ignored: Suffixes of tensors in checkpoints that are not loaded.
        prefix: Prefix of every name that some checkpoints leave out.
        old_endings: Suffixes of tensor names in old checkpoints, with the current ones.
        passed_over: Prefixes of tensors that the checkpoint may contain and that are not loaded.
        further_layers: Number of multi-token-prediction layers after the last that the checkpoint
            may contain; they are not loaded.
        draft_head: It is a draft head, whose only layer reads hidden states of another model.
        per_layer_embedding: Makes the input that each layer has beside the stream; None: they have
            none.
        streams: The streams that layers with `updates` have, and how they begin and end; None:
            there is one.
    """

    vocabulary: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    context_tokens: int
    norm: NormSpec
    norm_name: str | None = "model.norm"
    embedding: EmbeddingSpec = EmbeddingSpec()
    head: HeadSpec | ClassificationHeadSpec | None
    pooling: Pooling = "last"
    layer_name: str = "model.layers.{}"
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    prefix: str = ""
    old_endings: tuple[tuple[str, str], ...] = ()
    passed_over: tuple[str, ...] = ()
    further_layers: int = 0
    draft_head: DraftHeadSpec | None = None
    per_layer_embedding: PerLayerEmbeddingSpec | None = None
    streams: StreamsSpec | None = None

    @property
    def causal(self) -> bool:
        """Whether attention is causal, so that a text may be prefilled in chunks."""
        mixers = (mixer for layer in self.layers for mixer in layer.mixers)
        return not any(isinstance(mixer.cache, NoCache) for mixer in mixers)

    @property
    def has_experts(self) -> bool:
        blocks = (block for layer in self.layers for block in (layer.feed_forward, layer.second))
        return any(isinstance(block, MoeSpec) for block in blocks)

    @property
    def position_axes(self) -> bool:
        """Whether positions have axes, along which images lie."""
        mixers = (mixer for layer in self.layers for mixer in layer.mixers)
        return any(isinstance(m, AttentionSpec) and m.rotary and m.rotary.sections for m in mixers)

    @property
    def tied(self) -> bool:
        return isinstance(self.head, HeadSpec) and self.head.tied

    @property
    def cross(self) -> CrossAttentionSpec | None:
        """The cross attention that all of its layers have; None: they have none."""
        return self.layers[0].cross

    @property
    def cross_heads(self) -> tuple[int, int]:
        """How many layers have cross attention, and heads of each; zeros if none has."""
        return (0, 0) if self.cross is None else (len(self.layers), self.cross.heads)

    def cache_groups(self) -> tuple[tuple[CacheSpec, tuple[int, ...]], ...]:
        """Layers grouped by equal cache, full attention first, then narrow windows, then states.

        The layers of a group share page tables: entry g here is `page_tables[g]` of a plan. Layers
        that attend to the keys and values of others cache nothing, and are in none.
        """
        layers_by_cache: dict[CacheSpec, list[int]] = {}
        for index, layer in enumerate(self.layers):
            for mixer in layer.mixers:
                if not isinstance(mixer, AttentionSpec) or mixer.kv_layer is None:
                    layers_by_cache.setdefault(mixer.cache, []).append(index)
        ordered = sorted(layers_by_cache, key=_group_order)
        return tuple((spec, tuple(layers_by_cache[spec])) for spec in ordered)


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A family of models: its name, and the function that derives a model's spec from its config.

    `declare` raises `ModelLoadError` for a config that would be served incorrectly.
    """

    name: str
    declare: Callable[[ConfigFile], ModelSpec]


def _group_order(cache: CacheSpec) -> tuple[bool, bool, int]:
    window = cache.window if isinstance(cache, KvSpec) else None
    return isinstance(cache, StateSpec), window is not None, window or 0
