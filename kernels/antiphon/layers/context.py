"""The context of a forward pass, as layers access it.

Layers own weights and nothing else. The KV cache, the other ranks, adapters and the chosen kernels
come through a `ForwardContext`, so that the same layer serves prefill, decode and verification, one
rank or many, with or without adapters.
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
    """The attention parameters of a layer, the same in every forward pass.

    Attributes:
        scale: Of scores.
        rotary: RoPE of queries and keys; None: no RoPE.
        norms: Of each query and key head, before RoPE.
        softcap: Scores become softcap * tanh(score / softcap).
        sinks: (Q,) a score of each query head that takes part in the softmax and has no value.
        kv_heads: H on this rank.
        window: A query attends to itself and the window - 1 tokens before it, and to as many after
            it if bidirectional; None: to all. A KV cache takes it from its cache group instead.
    """

    scale: float
    rotary: RotarySpec | None
    norms: QkNormWeights | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    kv_heads: int = 0
    window: int | None = None


class AttentionBackend(Protocol):
    """Attention for a layer. Axes: T tokens, Q query heads, H kv heads, D head size."""

    def __call__(self, layer: int, heads: Tensor, params: AttentionParams) -> Tensor:
        """Apply RoPE, write this pass's keys and values, and attend to all of a row.

        heads (T, Q + 2 H, D), queries before keys before values  ->  (T, Q, D)
        """
        ...


class StateLookup(Protocol):
    """The recurrent states of a forward pass for a layer."""

    def __call__(self, layer: int) -> tuple[LayerStates, StateMetadata]:
        """A layer's states, and which of them each row of the pass reads and writes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionParams:
    """The parameters of latent attention in a layer.

    Attributes:
        scale: Of scores.
        rotary: RoPE of the position part of queries and keys.
        heads: The layer's projections between latents and heads.
    """

    scale: float
    rotary: RotarySpec
    heads: LatentHeads


class LatentAttentionBackend(Protocol):
    """Latent attention for a layer; axes as in `antiphon.kernels.latent`."""

    def __call__(
        self, layer: int, q: Tensor, latents: Tensor, params: LatentAttentionParams
    ) -> Tensor:
        """Apply RoPE, write this pass's latents, and attend to all of a row.

        q (T, Q, C + O) and latents (T, R + O), of which the last O are rotated  ->  (T, Q, V)
        """
        ...


class FusedForward(Protocol):
    """The fused decoder: all layers of a forward pass and the final norm in one call."""

    def __call__(self, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run a forward pass with the same bits as layer by layer.

        residual (T, hidden), overwritten  ->  (T, hidden) normalised, and (T,) bool: whether all
        of a token's elements are finite; None: all of all tokens are
        """
        ...


class Adapters(Protocol):
    """LoRA adapters of linears, selected for each token."""

    def add(self, linear: str, x: Tensor, y: Tensor, token_adapter: Tensor) -> Tensor:
        """The output of a linear with adapters added, before ranks are summed.

        linear: its name; x (T, I) its input; y (T, O) its output; token_adapter (T,) the index of
        each token's adapter, -1 without one  ->  (T, O)
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """One forward pass.

    Attributes:
        ops: The kernels chosen for this device.
        tp: The tensor-parallel group.
        attend: Attention over the paged KV cache, with RoPE.
        states_of: The recurrent states; unset: no layer has one.
        attend_latent: Attention over the latent cache; unset: no layer has one.
        positions: (T,) int32, of each token in its sequence.
        token_types: (T,) int32, the type of each token; unset: all are of type 0.
        token_adapter: (T,) index of each token's adapter, -1 without one; used with `adapters`.
        adapters: Unset: no row of this pass has an adapter.
        fused: Unset: this pass runs layer by layer.
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
        """The output of a linear with its rows' adapters added."""
        if self.adapters is None:
            return y
        assert self.token_adapter is not None, "adapters of unknown tokens"
        return self.adapters.add(linear, x, y, self.token_adapter)
