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

    from antiphon.kernels.latent import LatentHeads
    from antiphon.kernels.ops import Ops
    from antiphon.kernels.qk_norm_rope import QkNormWeights
    from antiphon.kernels.rotary import RotarySpec
    from antiphon.kernels.states import LayerStates, StateMetadata
    from antiphon.layers.tp import Tp


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """How a layer attends: what does not change from pass to pass.

    Attributes:
        scale: Of scores.
        rotary: How queries and keys are rotated; None: they are not.
        norms: Of each query and key head, before the rotation.
        softcap: Scores become softcap * tanh(score / softcap).
        sinks: (Q,) a score of each query head that takes part in the softmax and adds no value.
        kv_heads: H on this rank.
        window: A query sees itself and the window - 1 tokens before it, and as many after it if it
            sees any; None: all. A cache knows it by itself.
    """

    scale: float
    rotary: RotarySpec | None
    norms: QkNormWeights | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    kv_heads: int = 0
    window: int | None = None


class AttentionBackend(Protocol):
    """The cache as a layer meets it. Axes: T tokens, Q query heads, H kv heads, D head size."""

    def __call__(self, layer: int, heads: Tensor, manner: AttentionParams) -> Tensor:
        """Rotate queries and keys, keep this pass's keys and values, and attend over all of a row.

        heads (T, Q + 2 H, D), queries before keys before values  ->  (T, Q, D)
        """
        ...


class StateLookup(Protocol):
    """The states of a pass as a layer meets them."""

    def __call__(self, layer: int) -> tuple[LayerStates, StateMetadata]:
        """Where a layer's states lie, and which of them each row of the pass reads and writes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionParams:
    """How a layer attends over latents.

    Attributes:
        scale: Of scores.
        rotary: How the rotated part of queries and keys is.
        heads: What the layer's weights do between latents and heads.
    """

    scale: float
    rotary: RotarySpec
    heads: LatentHeads


class LatentAttentionBackend(Protocol):
    """A cache of latents as a layer meets it; axes as in `antiphon.kernels.latent`."""

    def __call__(
        self, layer: int, q: Tensor, latents: Tensor, manner: LatentAttentionParams
    ) -> Tensor:
        """Rotate, keep this pass's latents, and attend over all of a row.

        q (T, Q, C + O) and latents (T, R + O), of which the last O are rotated  ->  (T, Q, V)
        """
        ...


class FusedForward(Protocol):
    """All layers of one pass and the final norm at once, where the layers allow it."""

    def __call__(self, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run a pass with the bits that the layers would give one by one.

        residual (T, hidden), overwritten  ->  (T, hidden) normalised, and (T,) bool: whether all
        of a token's numbers are finite; None: all of all are
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
        attend: The paged cache, and the rotation of each token.
        recur: The recurrent states; unset: no layer has one.
        attend_latent: The same of layers that keep latents; unset: there are none.
        positions: (T,) int32, of each token in its sequence.
        token_types: (T,) int32, the type of each token; unset: all are of type 0.
        token_adapter: (T,) index of each token's adapter, -1 without one; of use with adapters.
        adapters: Unset: no row of this pass has one.
        fused: Unset: this pass goes layer by layer.
    """

    ops: Ops
    tp: Tp
    attend: AttentionBackend
    states_of: StateLookup | None = None
    attend_latent: LatentAttentionBackend | None = None
    positions: Tensor | None = None
    token_types: Tensor | None = None
    token_adapter: Tensor | None = None
    adapters: Adapters | None = None
    fused: FusedForward | None = None

    def adapt(self, linear: str, x: Tensor, y: Tensor) -> Tensor:
        """The output of a linear with its rows' adapters counted in."""
        if self.adapters is None:
            return y
        assert self.token_adapter is not None, "adapters of unknown tokens"
        return self.adapters.add(linear, x, y, self.token_adapter)
