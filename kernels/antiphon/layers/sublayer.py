"""The common interface of a layer's parts, and the context in which they are built.

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
    """The position of a part in the model that is being built.

    Attributes:
        layer: Index of its layer.
        name: Of its layer in the checkpoint; names in specs are relative to it.
        hidden: Width of the residual stream.
        method: Weight format of its linears.
    """

    layer: int
    name: str
    hidden: int
    build: BuildContext
    method: LinearMethod

    def tensor_name(self, tensor: str) -> str:
        """The full name in the checkpoint of one of the layer's tensors."""
        return f"{self.name}.{tensor}"


class Sublayer(Protocol):
    """A mixer or a feed-forward block, whose output is added to the residual stream."""

    @property
    def operations(self) -> frozenset[str]:
        """Names of the kernels that it calls through `ctx.ops`."""
        ...

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Apply the block: x (T, hidden)  ->  (T, hidden), the same on every rank."""
        ...

    def sources(self) -> Iterator[WeightSource]:
        """The checkpoint's tensors that it loads."""
        ...

    def pack(self) -> None:
        """Prepare weights for computing; called once all sources are loaded."""
        ...
