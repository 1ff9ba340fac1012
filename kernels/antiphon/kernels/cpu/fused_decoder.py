"""The fused decoder: one C++ call for all layers of a forward pass: csrc/stack.h.

Axes: T tokens, L tokens whose logits are requested, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch import Tensor

from antiphon.kernels.cpu import extension

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from antiphon.kernels.activation import ActivationKind
    from antiphon.kernels.attention import AttentionMetadata
    from antiphon.kernels.cpu.experts import CompiledExperts
    from antiphon.kernels.cpu.linear import CompiledLinear
    from antiphon.kernels.kv import LayerKvCache
    from antiphon.kernels.norm import NormWeights
    from antiphon.kernels.rotary import QkNormWeights, TokenCosSin


@dataclass(frozen=True, slots=True)
class FusedDecoderLayer:
    """The weights of one layer: packed linears, and the norms before, or after, its blocks.

    In place of `gate_up` and `down` there may be experts.
    """

    qkv: CompiledLinear
    out: CompiledLinear
    # Gate and up in halves, which become silu(gate) * up; or up alone, with an `activation`.
    gate_up: CompiledLinear | None
    down: CompiledLinear | None
    activation: ActivationKind | None
    attention_norm: NormWeights
    mlp_norm: NormWeights
    head_norms: QkNormWeights | None
    experts: CompiledExperts | None = None


class UncachedHeads(NamedTuple):
    """What a bidirectional layer has in place of a KV cache: its group of rows, and its heads."""

    group: int
    heads: int  # H, kv heads
    head_size: int


class EmbeddingAndHead(NamedTuple):
    """The embedding before the layers and the head after them."""

    embedding: CompiledLinear | Tensor
    """A packed linear whose weights are the embeddings, or a table (V, hidden)."""
    head: CompiledLinear


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


class FusedDecoder:
    """Layers and the final norm, and with `ends` everything between ids and logits.

    The bits of a row equal those of the separate `cpu` operations. The weights of a step evict all
    else from the CPU caches, so that a Python call costs many times its work.
    """

    def __init__(
        self,
        layers: Iterable[tuple[FusedDecoderLayer, LayerKvCache | UncachedHeads]],
        *,
        final_norm: NormWeights,
        eps: float,
        scale: float,
        norm: Literal["rms", "layer"] = "rms",
        post_norms: bool = False,
        ends: EmbeddingAndHead | None = None,
    ) -> None:
        """With `post_norms` blocks read the residual stream, which is normalised after each.

        The last of these is the final norm.
        """
        self.scores = ends is not None
        library = extension.load()
        self._compiled = library.Stack(
            norm=getattr(library.NormKind, norm),
            post_norms=post_norms,
            final_norm=final_norm,
            eps=eps,
            scale=scale,
        )
        for layer, cache in layers:
            query_norm, key_norm, _ = layer.head_norms or (None, None, None)
            kind = layer.activation
            self._compiled.add(
                qkv=layer.qkv,
                out=layer.out,
                gate_up=layer.gate_up,
                down=layer.down,
                experts=layer.experts,
                activation=None if kind is None else getattr(library.Activation, kind),
                attention_norm=layer.attention_norm,
                mlp_norm=layer.mlp_norm,
                query_norm=query_norm,
                key_norm=key_norm,
                group=cache.group,
                cache=cache[1:]
                if isinstance(cache, UncachedHeads)
                else (cache.keys, cache.values, *cache.scales),
            )
        if ends is not None:
            looked_up = isinstance(ends.embedding, Tensor)
            self._compiled.set_ends(
                embedding=None if looked_up else ends.embedding,
                table=ends.embedding if looked_up else None,
                head=ends.head,
            )

    def __call__(
        self, residual: Tensor, turns: TokenCosSin, groups: Sequence[AttentionMetadata]
    ) -> tuple[Tensor, Tensor | None]:
        """Run a forward pass.

        residual (T, hidden), overwritten  ->  (T, hidden) normalised, and (T,) bool: whether all
        of a token's elements are finite; None: all of all tokens are
        """
        compiled = [rows.compile() for rows in groups]
        return self._compiled.forward(residual, turns.cos, turns.sin, turns.positions, compiled)

    def score(
        self,
        ids: NDArray[np.int32],
        logit_indices: NDArray[np.int32],
        turns: TokenCosSin,
        groups: Sequence[AttentionMetadata],
        *,
        argmax_only: bool = False,
    ) -> FusedDecoderOutput:
        """Run a forward pass from ids (T,) to logits of the tokens `logit_indices` (L,), ascending.

        With `argmax_only` the result need not contain hidden states and logits.
        """
        assert self.scores, "made with ends"
        # Not cached: the C++ decoder keeps them, and advances them in `decode_next`.
        compiled = [rows.compile() for rows in groups]
        turned = turns.cos, turns.sin, turns.positions
        return FusedDecoderOutput(
            *self._compiled.score(ids, logit_indices, *turned, compiled, argmax_only)
        )

    def decode_next(
        self,
        ids: NDArray[np.int32],
        tables: tuple[NDArray[np.int32], ...],
        argmax_only: bool = False,  # by name it would cost more
    ) -> FusedDecoderOutput | None:
        """Run the next decode step of the previous pass, each row one token further.

        Rows, positions and scratch memory of the previous pass are reused. Earlier results do not
        change. ids (T,); tables (T, N) of each cache group, as in `AttentionMetadata`.

        None where only `score` can compute it: if the previous pass had rows of several tokens or
        without logits, or raised, if the number of ids differs, or beyond the computed cosines and
        sines.

        Raises:
            IndexError: An id is out of range.
            RuntimeError: A row reads or writes a token that has no page.
        """
        scored = self._compiled.decode_next(ids, tables, argmax_only)
        return None if scored is None else FusedDecoderOutput(*scored)
