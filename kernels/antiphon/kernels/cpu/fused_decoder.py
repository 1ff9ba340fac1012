"""A decoder as one call a step, in C++: csrc/stack.h.

Axes: T tokens, L tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from antiphon.kernels.cpu import extension

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from antiphon.kernels.attention import AttentionMetadata
    from antiphon.kernels.cpu.linear import CompiledLinear
    from antiphon.kernels.kv import LayerKvCache
    from antiphon.kernels.qk_norm_rope import QkNormWeights
    from antiphon.kernels.rotary import TokenCosSin


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedDecoderLayer:
    """What one layer computes with: packed linears, and norms (hidden,).

    Attributes:
        qkv: hidden -> queries, keys and values side by side.
        gate_up: hidden -> gate and up, packed in halves.
    """

    qkv: CompiledLinear
    out: CompiledLinear
    gate_up: CompiledLinear
    down: CompiledLinear
    attention_norm: Tensor
    mlp_norm: Tensor
    head_norms: QkNormWeights | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingAndHead:
    """What comes before the layers and after them.

    Attributes:
        embedding: A linear whose outputs' weights are the embeddings, or a table (V, hidden).
        head: hidden -> logits.
    """

    embedding: CompiledLinear | Tensor
    head: CompiledLinear


class FusedDecoderOutput(NamedTuple):
    """What a pass with logits leaves.

    Attributes:
        hidden: (T, hidden), normalised. A bare result has neither this nor logits, if all is
            finite.
        finite: (T,) bool, whether all of a token's numbers are; None: all of all are.
        logits: (L, V) float32.
        logits_finite: (L,) bool, as `finite`.
        likeliest: (L,) int32, the first of the highest logits; None: nobody has looked.
    """

    hidden: Tensor
    finite: Tensor | None
    logits: Tensor
    logits_finite: Tensor | None
    argmax: NDArray[np.int32] | None


class FusedDecoder:
    """Layers and the final norm, and with `ends` all that lies between ids and logits.

    A row's bits are those of the single `cpu` operations. A step's weights drive all else out of
    the caches, so that a call costs many times its work: the fewer, the better.
    """

    def __init__(
        self,
        layers: Iterable[tuple[FusedDecoderLayer, LayerKvCache]],
        *,
        final_norm: Tensor,
        eps: float,
        scale: float,
        ends: EmbeddingAndHead | None = None,
    ) -> None:
        self.scores = ends is not None
        self._compiled = extension.load().Stack(final_norm=final_norm, eps=eps, scale=scale)
        for layer, cache in layers:
            norms = layer.head_norms
            self._compiled.add(
                qkv=layer.qkv,
                out=layer.out,
                gate_up=layer.gate_up,
                down=layer.down,
                attention_norm=layer.attention_norm,
                mlp_norm=layer.mlp_norm,
                query_norm=None if norms is None else norms.query,
                key_norm=None if norms is None else norms.key,
                group=cache.group,
                keys=cache.keys,
                values=cache.values,
                scales=cache.scales,
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
        """Run a pass.

        residual (T, hidden), overwritten  ->  (T, hidden) normalised, and (T,) bool: whether all
        of a token's numbers are finite; None: all of all are
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
        """Run a pass from ids (T,) to the logits of the `wanted` tokens (L,), rising.

        Who wants the likeliest tokens alone asks for a `bare` result, and is spared the tensors.
        """
        assert self.scores, "made with ends"
        # Made for this pass: the stack keeps them, and moves them on.
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
        """Run the pass before once more, each row one token further.

        The rows, their rotation and all room are still there, so that nothing is made anew.
        Nothing that a pass has given changes by this.

        Args:
            ids: (T,)
            tables: (T, N) as in `AttentionMetadata`, of each cache group; others may follow.
            argmax_only: As in `score`.

        Returns:
            What `score` would give; None where only that can tell: after another pass than one of
            rows of one token each with logits of all, after one that raised, with another number
            of ids, or beyond the known angles.

        Raises:
            IndexError: An id is none.
            RuntimeError: A row reads or writes a token that has no page.
        """
        scored = self._compiled.decode_next(ids, tables, argmax_only)
        return None if scored is None else FusedDecoderOutput(*scored)
