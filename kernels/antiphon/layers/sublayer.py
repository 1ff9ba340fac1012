"""The common interface of a layer's parts, and the context in which they are built.

A kind of sublayer is a frozen spec beside the class that computes it; the class is built from a
`LayerBuildContext` and its spec, and is a `Sublayer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.layers.linear import (
    WHOLE_TENSOR,
    CheckpointLayout,
    ColumnLinear,
    LinearPart,
    RowLinear,
    replicated,
)
from antiphon.layers.norm import Norm, NormSpec, build_norm
from antiphon.layers.weights import BuildContext, Module

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.layers.context import ForwardContext
    from antiphon.layers.methods import LinearMethod


@dataclass(frozen=True, slots=True)
class LayerBuildContext:
    """The position of a part in the model that is being built."""

    layer: int  # index of its layer
    name: str  # of its layer in the checkpoint; names in specs are relative to it
    hidden: int  # width of the residual stream
    build: BuildContext
    method: LinearMethod  # weight format of its linears

    def tensor_name(self, tensor: str) -> str:
        return f"{self.name}.{tensor}"

    def column(
        self,
        name: str,
        parts: tuple[LinearPart, ...],
        *,
        bias: bool,
        halves: bool = False,
        inputs: int | None = None,
    ) -> ColumnLinear:
        """A linear from the residual stream to this rank's share of each part.

        `inputs`: the width of what it reads in place of the stream.
        """
        return ColumnLinear(
            f"{self.name}.{name}",
            inputs or self.hidden,
            parts,
            bias=bias,
            build=self.build,
            method=self.method,
            halves=halves,
        )

    def row(
        self, tensor: str, inputs: int, *, bias: bool, stored: CheckpointLayout = WHOLE_TENSOR
    ) -> RowLinear:
        """A linear from this rank's share of the inputs back to the residual stream."""
        return RowLinear(
            self.tensor_name(tensor),
            inputs,
            self.hidden,
            bias=bias,
            build=self.build,
            method=self.method,
            stored=stored,
        )

    def replicated(
        self, tensor: str, outputs: int, *, bias: bool, method: LinearMethod | None = None
    ) -> ColumnLinear:
        return replicated(
            self.tensor_name(tensor),
            self.hidden,
            outputs,
            bias=bias,
            build=self.build,
            method=method or self.method,
        )

    def norm(self, spec: NormSpec, tensor: str, size: int) -> Norm:
        return build_norm(spec, self.tensor_name(tensor), size, self.build)


class Sublayer(Module):
    """A mixer or a feed-forward block, whose output is added to the residual stream."""

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Apply the block: x (T, hidden)  ->  (T, hidden), the same on every rank."""
        raise NotImplementedError
