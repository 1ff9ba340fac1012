"""What one model looks like, as its family declares it. The decoder is built from this alone.

A `ModelSpec` is a tuple of `LayerSpec`s between an embedding and a head. A layer is a mixer (what
lets tokens see each other), a feed-forward part, the norms around both, and how their outputs join
the residual stream.

Mixers and feed-forward parts are tagged kinds: each is a frozen spec, a member of the union
`MixerSpec` or `FeedForwardSpec` below, and lies in `antiphon.layers` beside the block that computes
it. To add a kind:

1. In a file of its own in `antiphon.layers`, write a frozen dataclass with what differs between
   models (sizes, switches, and the checkpoint's names, each relative to its layer) and a class
   built as `Block(site, spec)` that has the methods of `layers.block.Block`. What it needs of a
   pass it gets from its `ForwardContext`.
2. Add the spec to the union here, and the line `NewSpec: NewBlock` to `MIXERS` or `FEED_FORWARDS`
   in `decoder`.
3. A mixer's spec says with `cache` what it keeps. Layers whose
   `cache` is equal share a cache group. A new kind of cache is one more member of `CacheSpec`.
4. Give a family that has it its row in `tests/models/families.py`, with a mutant a feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.kernels.bidirectional import NoCache
from antiphon.kernels.kv import KvSpec
from antiphon.kernels.latent import LatentSizes
from antiphon.kernels.states import StateSpec
from antiphon.layers.attention import AttentionSpec
from antiphon.layers.classification_head import ClassificationHeadSpec
from antiphon.layers.gated_delta import GatedDeltaSpec
from antiphon.layers.mamba2 import Mamba2Spec
from antiphon.layers.mla import LatentSpec
from antiphon.layers.mlp import GatedMlpSpec, PlainMlpSpec
from antiphon.layers.moe import MoeSpec
from antiphon.layers.norm import NormSpec
from antiphon.layers.parallel_mixers import BranchSpec, ParallelMixersSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.model.config_file import ConfigFile

MixerSpec = AttentionSpec | LatentSpec | Mamba2Spec | GatedDeltaSpec | ParallelMixersSpec
"""What lets tokens see each other."""
FeedForwardSpec = GatedMlpSpec | PlainMlpSpec | MoeSpec
"""What transforms each token by itself."""
CacheSpec = KvSpec | LatentSizes | StateSpec | NoCache
"""What a mixer keeps: of each token, of all of them together, or nothing."""
Pooling = Literal["last", "cls", "mean"]
"""What stands for a whole text: the vector of its last token, of its first, or their mean."""


class Norms(msgspec.Struct, frozen=True, kw_only=True):
    """Which norms a layer has, by their names in the checkpoint after the layer's; None: none.

    Attributes:
        after_mixer, after_feed_forward: Of what the part gives, before that joins the stream.
        with_mixer, with_feed_forward: Of the stream, once that has joined it.
    """

    before_mixer: str | None = None
    after_mixer: str | None = None
    before_feed_forward: str | None = None
    after_feed_forward: str | None = None
    with_mixer: str | None = None
    with_feed_forward: str | None = None


PRE = Norms(before_mixer="input_layernorm", before_feed_forward="post_attention_layernorm")
"""Both parts see a normalised stream, and what they give is added as it is."""
POST = Norms(
    after_mixer="post_attention_layernorm", after_feed_forward="post_feedforward_layernorm"
)
"""Both parts see the stream itself, and what they give is normalised."""
SANDWICH = Norms(
    before_mixer="input_layernorm",
    after_mixer="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)
"""Both."""


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One layer.

    Attributes:
        feed_forward: None: the layer has a mixer only.
        norm: The kind of all its norms.
        norms: Which of them there are.
        parallel: Both parts see the stream that enters the layer; without a norm of its own the
            feed-forward part sees what the mixer sees.
        multiplier: What each part gives is multiplied by this before it is added.
    """

    mixer: MixerSpec
    feed_forward: FeedForwardSpec | None
    norm: NormSpec
    norms: Norms = PRE
    parallel: bool = False
    multiplier: float = 1.0

    @property
    def mixers(self) -> tuple[BranchSpec | LatentSpec, ...]:
        """Its mixer, or those that are side by side in it."""
        if isinstance(self.mixer, ParallelMixersSpec):
            return tuple(branch.mixer for branch in self.mixer.branches)
        return (self.mixer,)


class EmbeddingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens become the residual stream.

    Attributes:
        scale: What the embedding is multiplied by.
        positions: The name of a table of learned positions, one a token of the context.
        positions_first: Rows of that table before the first position.
        types: The name of a table of learned types of tokens.
        types_count: How many there are.
        norm: Of the sum of all these; None: it is left as it is. Its name is `norm_name`.
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
        tied: Whether the embedding is the head.
        scale: What logits are multiplied by.
        softcap: Logits become softcap * tanh(logit / softcap).
    """

    name: str = "lm_head"
    tied: bool
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One model: everything that building its decoder needs.

    Attributes:
        norm: After the last layer; its name is `norm_name`. Without a name there is none.
        head: What the normalised stream becomes: logits, or scores of whole texts; None: nothing,
            the stream itself is what is asked for.
        pooling: How a text becomes one vector where the request does not say, and for scores.
        layer_name: What the checkpoint calls a layer, with `{}` for its index.
        ignored: Endings of tensors that checkpoints carry and nobody takes.
        prefix: What some checkpoints leave out at the start of every name.
        old_endings: Of names of tensors, as some checkpoints have them and as others do.
        passed_over: How names begin that may be in the checkpoint and nobody takes.
        further_layers: So many layers after the last, which predict tokens beyond the next, may be
            in the checkpoint; nobody takes them.
    """

    family: str
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

    @property
    def generative(self) -> bool:
        """Whether it has logits, which a token can be drawn from."""
        return isinstance(self.head, HeadSpec)

    @property
    def causal(self) -> bool:
        """Whether no token sees what comes after it, so that a text may be computed in pieces."""
        mixers = (mixer for layer in self.layers for mixer in layer.mixers)
        return not any(isinstance(mixer.cache, NoCache) for mixer in mixers)

    @property
    def tied(self) -> bool:
        """Whether its embedding is its head, too."""
        return isinstance(self.head, HeadSpec) and self.head.tied

    def cache_groups(self) -> tuple[tuple[CacheSpec, tuple[int, ...]], ...]:
        """Layers that keep the same, full attention first, then narrow windows, then states.

        A group of layers shares page tables: entry g here is `page_tables[g]` of a plan.
        """
        kept: dict[CacheSpec, list[int]] = {}
        for index, layer in enumerate(self.layers):
            for mixer in layer.mixers:
                kept.setdefault(mixer.cache, []).append(index)
        ordered = sorted(kept, key=_group_order)
        return tuple((spec, tuple(kept[spec])) for spec in ordered)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A family of models: the name, and the function that makes a model's spec of its config.

    Attributes:
        declare: Raises `ModelLoadError` for a config that would be served wrongly.
        features: What its models have that a plain Llama has not, each with a mutant in the parity
            test, which shows that it is computed.
        layers_of: The family that has these layers under another head, and their features.
    """

    name: str
    declare: Callable[[ConfigFile], ModelSpec]
    features: tuple[str, ...] = ()
    layers_of: ModelFamily | None = None


def _group_order(kept: CacheSpec) -> tuple[bool, bool, int]:
    window = kept.window if isinstance(kept, KvSpec) else None
    return isinstance(kept, StateSpec), window is not None, window or 0
