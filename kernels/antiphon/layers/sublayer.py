"""What the parts of a decoder layer have in common: where one is built, and what it can do.

A kind of sublayer is a frozen spec beside the class that computes it; the class is built from a
`LayerBuildContext` and its spec, and is a `Sublayer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.layers.context import ForwardContext
    from antiphon.layers.methods import LinearMethod
    from antiphon.layers.weights import BuildContext, WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBuildContext:
    """Where in a model a part is built.

    Attributes:
        layer: Index of its layer.
        name: Of its layer in the checkpoint; specs name their tensors after it.
        hidden: Width of the residual stream.
        method: How its linears are kept.
    """

    layer: int
    name: str
    hidden: int
    build: BuildContext
    method: LinearMethod

    def tensor_name(self, tensor: str) -> str:
        """The checkpoint's name of one of the layer's tensors."""
        return f"{self.name}.{tensor}"


class Sublayer(Protocol):
    """A mixer or a feed-forward part: it transforms the stream, and what it gives is added."""

    @property
    def operations(self) -> frozenset[str]:
        """Names of the kernels that it calls through `ctx.ops`."""
        ...

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Transform x (T, hidden)  ->  (T, hidden), the same on every rank."""
        ...

    def sources(self) -> Iterator[WeightSource]:
        """The checkpoint's tensors that it takes."""
        ...

    def pack(self) -> None:
        """Called once all sources are loaded."""
        ...
