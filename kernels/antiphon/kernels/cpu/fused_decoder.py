"""The fused decoder: one C++ call for all layers of a forward pass: csrc/stack.h.

Axes: T tokens, L tokens whose logits are requested, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from antiphon.kernels.cpu import extension
from antiphon.kernels.cpu.linear import DTYPE_NAMES
from antiphon.kernels.cpu.ops import compile_qk_norms

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from antiphon.kernels.activation import ActivationKind
    from antiphon.kernels.attention import AttentionMetadata
    from antiphon.kernels.cpu.experts import CompiledExperts
    from antiphon.kernels.cpu.extension import CompiledRecurrence
    from antiphon.kernels.cpu.linear import CompiledHeadLinears, CompiledLinear
    from antiphon.kernels.kv import LayerKvCache
    from antiphon.kernels.norm import NormKind, NormWeights
    from antiphon.kernels.recurrent import LayerStates, StateMetadata
    from antiphon.kernels.rotary import QkNormWeights, TokenCosSin


class BlockNorms(NamedTuple):
    """The norms of a block; None: it has no such norm."""

    before: NormWeights | None = None  # of the stream that it reads; None: it reads the stream
    after: NormWeights | None = None  # of its output
    # Of the sum of both, which is the stream from there on; None: the sum is.
    of_sum: NormWeights | None = None


class MixerScales(NamedTuple):
    """Factors of what a mixer reads, and of its output."""

    inputs: float = 1.0
    output: float = 1.0


UNIT_SCALES = MixerScales()


@dataclass(frozen=True, slots=True)
class FusedRecurrence:
    """A recurrent mixer: its projections, what lies between them, and the states that it has."""

    layer: CompiledRecurrence
    inputs: CompiledLinear
    out: CompiledLinear
    states: LayerStates
    scales: MixerScales = UNIT_SCALES


class FusedLatent(NamedTuple):
    """Latent attention in its absorbed form: `latent.latent_attention`."""

    query_down: CompiledLinear | None  # to the queries' latent, which is normalised
    query_norm: Tensor | None
    query_eps: float
    query: CompiledLinear  # to the heads, contents and positions of each
    down: CompiledLinear  # to a token's latent, which is normalised, and its position
    norm: Tensor
    eps: float
    absorb: CompiledHeadLinears
    restore: CompiledHeadLinears
    content: int
    position: int
    interleaved: bool  # whether RoPE pairs are adjacent elements


@dataclass(frozen=True, slots=True)
class FusedDecoderLayer:
    """The weights of one layer: packed linears, and the norms around its blocks.

    It has attention, a recurrence, or both, whose outputs are added. In place of `qkv` there may be
    latent attention, and in place of `gate_up` and `down` experts.
    """

    qkv: CompiledLinear | None
    out: CompiledLinear | None
    # Gate and up in halves, which become activation(gate) * up; or up alone, which is activated.
    gate_up: CompiledLinear | None
    down: CompiledLinear | None
    activation: ActivationKind
    attention_norms: BlockNorms
    mlp_norms: BlockNorms
    head_norms: QkNormWeights | None
    scale: float  # of scores
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # (Q,) a score of each query head that has no value
    rotary: int = 0  # index of the layer's angles among those of a pass
    experts: CompiledExperts | None = None
    # Both blocks read the stream that enters the layer; without a norm before it, the feed-forward
    # block reads what attention reads.
    parallel: bool = False
    multiplier: float = 1.0  # of the output of each block
    # Factors of the gate before its activation, and of what `down` gives.
    mlp_scales: tuple[float, float] = (1.0, 1.0)
    # Behind queries, keys and values `qkv` gives a gate for each query, whose sigmoid multiplies
    # what the head attends to.
    gated: bool = False
    attention_scales: MixerScales = UNIT_SCALES
    recurrence: FusedRecurrence | None = None
    latent: FusedLatent | None = None


class UncachedHeads(NamedTuple):
    """What a bidirectional layer has in place of a KV cache: its group of rows, and its heads."""

    group: int
    heads: int  # H, kv heads
    head_size: int


class EmbeddingAndHead(NamedTuple):
    """The embedding before the layers and the head after them."""

    # A packed linear whose weights are the embeddings, or a table (V, hidden).
    embedding: CompiledLinear | Tensor
    head: CompiledLinear
    embedding_scale: float = 1.0
    positions: Tensor | None = None  # (positions, hidden), learned, added to the embeddings
    logits_scale: float = 1.0
    softcap: float | None = None  # logits become softcap * tanh(logit / softcap)


class FusedDecoderOutput(NamedTuple):
    """The output of a forward pass with logits."""

    # (T, hidden), normalised. With `argmax_only` neither this nor logits are set, if all is finite.
    hidden: Tensor
    # (T,) bool, whether all of a token's elements are finite; None: all of all tokens are.
    finite: Tensor | None
    logits: Tensor  # (L, V) float32
    logits_finite: Tensor | None  # (L,) bool, as `finite`
    # (L,) int32, the first of the highest logits; None: not computed.
    argmax: NDArray[np.int32] | None
    # (T, layers * hidden), the residual stream as it enters the auxiliary layers; None: no layers.
    aux: Tensor | None = None


class FusedDecoder:
    """Layers and the final norm, and with `ends` everything between ids and logits.

    The bits of a row equal those of the separate `cpu` operations. The weights of a step evict all
    else from the CPU caches, so that a Python call costs many times its work.
    """

    def __init__(
        self,
        layers: Iterable[tuple[FusedDecoderLayer, LayerKvCache | UncachedHeads | None]],
        *,
        hidden: int,
        dtype: torch.dtype,
        final_norm: NormWeights | None,
        eps: float,
        norm: NormKind = "rms",
        ends: EmbeddingAndHead | None = None,
        aux_layers: Sequence[int] = (),
    ) -> None:
        """Layers without attention have no cache.

        Without a `final_norm` the stream behind the last layer is the result, a norm itself. Every
        pass outputs the stream as it enters each of `aux_layers`, ascending, too.
        """
        self.scores = ends is not None
        library = extension.load()
        self._compiled = library.Stack(
            dtype=getattr(library.Dtype, DTYPE_NAMES[dtype]),
            hidden=hidden,
            norm=getattr(library.NormKind, norm),
            final_norm=final_norm,
            eps=eps,
        )
        for layer, cache in layers:
            recurrent = layer.recurrence
            self._compiled.add(
                qkv=layer.qkv,
                out=layer.out,
                gated=layer.gated,
                attention_scales=layer.attention_scales,
                recurrent=recurrent
                and (
                    recurrent.layer,
                    recurrent.inputs,
                    recurrent.out,
                    recurrent.scales,
                    recurrent.states.conv_states,
                    recurrent.states.recurrent_states,
                    recurrent.states.group,
                ),
                latent=layer.latent,
                gate_up=layer.gate_up,
                down=layer.down,
                experts=layer.experts,
                activation=getattr(library.Activation, layer.activation),
                mlp_scales=layer.mlp_scales,
                attention_norms=layer.attention_norms,
                mlp_norms=layer.mlp_norms,
                parallel=layer.parallel,
                multiplier=layer.multiplier,
                head_norms=layer.head_norms and compile_qk_norms(layer.head_norms),
                scale=layer.scale,
                softcap=layer.softcap,
                sinks=layer.sinks,
                rotary=layer.rotary,
                group=0 if cache is None else cache.group,
                cache=_compile_cache(cache),
            )
        self._compiled.set_aux_layers(list(aux_layers))
        if ends is not None:
            looked_up = isinstance(ends.embedding, Tensor)
            self._compiled.set_ends(
                embedding=None if looked_up else ends.embedding,
                table=ends.embedding if looked_up else None,
                scale=ends.embedding_scale,
                positions=ends.positions,
                head=ends.head,
                logits_scale=ends.logits_scale,
                softcap=ends.softcap or 0.0,
            )

    def __call__(
        self,
        residual: Tensor,
        turns: Sequence[TokenCosSin],
        groups: Sequence[AttentionMetadata],
        states: Sequence[StateMetadata] = (),
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run a forward pass; `turns` are those that layers have an index of.

        residual (T, hidden), overwritten  ->  (T, hidden) normalised; (T,) bool: whether all of a
        token's elements are finite, None: all of all tokens are; and (T, layers * hidden) the
        stream as it enters the auxiliary layers, None: no layers
        """
        compiled = [rows.compile() for rows in groups]
        angles = [(each.cos, each.sin, each.query_scale) for each in turns]
        rows = [each.compile() for each in states]
        return self._compiled.forward(residual, angles, turns[0].positions, compiled, rows)

    def score(
        self,
        ids: NDArray[np.int32],
        logit_indices: NDArray[np.int32],
        turns: Sequence[TokenCosSin],
        groups: Sequence[AttentionMetadata],
        states: Sequence[StateMetadata] = (),
        *,
        argmax_only: bool = False,
    ) -> FusedDecoderOutput:
        """Run a forward pass from ids (T,) to logits of the tokens `logit_indices` (L,), ascending.

        With `argmax_only` the result need not contain hidden states and logits.
        """
        assert self.scores, "made with ends"
        # Not cached: the C++ decoder keeps them, and advances them in `decode_next`.
        compiled = [rows.compile() for rows in groups]
        angles = [(each.cos, each.sin, each.query_scale) for each in turns]
        positions = turns[0].positions
        rows = [each.compile() for each in states]
        return FusedDecoderOutput(
            *self._compiled.score(
                ids, logit_indices, angles, positions, compiled, rows, argmax_only
            )
        )

    def decode_next(
        self,
        ids: NDArray[np.int32],
        tables: tuple[NDArray[np.int32], ...],
        argmax_only: bool = False,  # by name it would cost more
    ) -> FusedDecoderOutput | None:
        """Run the next decode step of the previous pass, each row one token further.

        Rows, positions and scratch memory of the previous pass are reused. Earlier results do not
        change. ids (T,); tables (T, N) of each cache group, as in `AttentionMetadata`, and
        (T, 1 + W) of each group of states: those that are read before those that are written.

        None where only `score` can compute it: if the previous pass had rows of several tokens or
        without logits, or raised, if the number of ids differs, or beyond the computed cosines and
        sines.

        Raises:
            IndexError: An id is out of range.
            RuntimeError: A row reads or writes a token that has no page.
        """
        scored = self._compiled.decode_next(ids, tables, argmax_only)
        return None if scored is None else FusedDecoderOutput(*scored)


def _compile_cache(cache: LayerKvCache | UncachedHeads | None) -> tuple[object, ...] | None:
    if cache is None:
        return None
    if isinstance(cache, UncachedHeads):
        return cache[1:]
    if cache.values is cache.keys:  # latents, which have one scale
        return cache.keys, cache.keys, cache.scales.key, cache.scales.key
    return cache.keys, cache.values, *cache.scales
