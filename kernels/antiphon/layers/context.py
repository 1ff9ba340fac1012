"""What a layer may know of the pass it runs in.

Layers hold weights and nothing else. The cache, the other ranks, the adapters of the rows and the
chosen kernels reach them through a `ForwardContext`, so that the same layer serves prefill, decode
and verification, one rank or many, with or without adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.ops import Ops
    from antiphon.layers.tp import Tp


class Attend(Protocol):
    """The cache as a layer meets it. Axes: T tokens, Q query heads, H kv heads, D head size."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep this pass's keys and values, and attend over all of each row's.

        q (T, Q, D), k and v (T, H, D)  ->  (T, Q, D)
        """
        ...


class Adapters(Protocol):
    """Low-rank additions to linears, each token with its row's own."""

    def add(self, linear: str, x: Tensor, y: Tensor, token_adapter: Tensor) -> Tensor:
        """What the linear gives once adapters are counted in, before ranks are summed.

        linear: its name; x (T, I) what went in; y (T, O) what came out; token_adapter (T,) the
        index of each token's adapter, -1 without one  ->  (T, O)
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """One pass.

    Attributes:
        ops: The kernels chosen for this device.
        tp: The ranks that share each layer.
        attend: The paged cache.
        cos: Of each token's position, (T, 1, D).
        sin: Likewise, signed as `kernels.rotary` wants it.
        token_adapter: (T,) index of each token's adapter, -1 without one.
        adapters: Unset: no row of this pass has one.
    """

    ops: Ops
    tp: Tp
    attend: Attend
    cos: Tensor
    sin: Tensor
    token_adapter: Tensor
    adapters: Adapters | None = None

    def adapt(self, linear: str, x: Tensor, y: Tensor) -> Tensor:
        """The output of a linear with its rows' adapters counted in."""
        if self.adapters is None:
            return y
        return self.adapters.add(linear, x, y, self.token_adapter)
