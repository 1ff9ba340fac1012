"""All layers of a decoder as one call a step, in C++: csrc/stack.h."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.kernels.cpu import extension

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from antiphon.kernels.attention import AttentionRows
    from antiphon.kernels.cpu.linear import Linear
    from antiphon.kernels.heads import HeadNorms
    from antiphon.kernels.kv import LayerCache
    from antiphon.kernels.rotary import Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLayer:
    """What one layer computes with: packed linears, and norms (hidden,).

    Attributes:
        qkv: hidden -> queries, keys and values side by side.
        gate_up: hidden -> gate and up, packed in halves.
    """

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    attention_norm: Tensor
    mlp_norm: Tensor
    head_norms: HeadNorms | None


class Stack:
    """Layers and the final norm. A row's bits are those of the single `cpu` operations."""

    def __init__(
        self,
        layers: Iterable[tuple[StackLayer, LayerCache]],
        *,
        final_norm: Tensor,
        eps: float,
        scale: float,
    ) -> None:
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

    def __call__(
        self, residual: Tensor, turns: Turns, groups: Sequence[AttentionRows]
    ) -> tuple[Tensor, Tensor | None]:
        """Run a pass.

        residual (T, hidden), overwritten  ->  (T, hidden) normalised, and (T,) bool: whether all
        of a token's numbers are finite; None: all of all are
        """
        compiled = [rows.compiled for rows in groups]
        return self._compiled.forward(residual, turns.cos, turns.sin, turns.positions, compiled)
