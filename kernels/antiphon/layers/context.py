"""The context of a forward pass, as layers access it.

Layers own weights and nothing else. The KV cache, the other ranks and the chosen kernels come
through a `ForwardContext`, so that the same layer serves prefill and decode, one rank or many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from antiphon.kernels.latent import LatentHeads
    from antiphon.kernels.ops import Ops
    from antiphon.kernels.recurrent import Recurrence
    from antiphon.kernels.rotary import QkNormWeights, RotarySpec
    from antiphon.layers.weights import Tp


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """The attention parameters of a layer, the same in every forward pass."""

    scale: float  # of scores
    rotary: RotarySpec | None  # RoPE of queries and keys; None: no RoPE
    norms: QkNormWeights | None = None  # of each query and key head, before RoPE
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    # (Q,) a score of each query head that takes part in the softmax and has no value.
    sinks: Tensor | None = None
    kv_heads: int = 0  # H on this rank; 0 without keys and values of its own
    # The layer whose keys and values it attends to, which has run before; None: it has its own.
    kv_layer: int | None = None
    # Whether tokens of an image attend to each other in both directions, in models in which they
    # do somewhere.
    image_ahead: bool = True
    # A query attends to itself and the window - 1 tokens before it, and to as many after it if
    # bidirectional; None: to all. A KV cache takes it from its cache group instead.
    window: int | None = None


AttentionBackend = Callable[[int, Tensor, AttentionParams], Tensor]
"""Applies RoPE, writes this pass's keys and values, and attends to all of a row: the layer, its
heads (T, Q + 2 H, D), queries before keys before values, and its parameters  ->  (T, Q, D).
Axes: T tokens, Q query heads, H kv heads, D head size; H is 0 where another layer has them."""

RecurrenceBackend = Callable[[int, Tensor, "Recurrence"], Tensor]
"""Runs a recurrence over the states of each row of the pass, which it changes: the layer, its
projected tokens (T, inputs), and what it computes of them  ->  (T, H * columns)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionParams:
    """The parameters of latent attention in a layer."""

    scale: float  # of scores
    rotary: RotarySpec  # RoPE of the position part of queries and keys
    heads: LatentHeads  # the layer's projections between latents and heads
    value: int  # elements of a head's value: V


LatentAttentionBackend = Callable[[int, Tensor, Tensor, LatentAttentionParams], Tensor]
"""Applies RoPE, writes this pass's latents, and attends to all of a row: the layer, q (T, Q, C + O)
and latents (T, R + O), of which the last O are rotated, and its parameters  ->  (T, Q, V). Axes as
in `antiphon.kernels.latent`."""


class HiddenStates(NamedTuple):
    """What the layers make of the tokens of a pass."""

    hidden: Tensor  # (T, hidden), normalised
    finite: Tensor | None  # (T,) whether all of a token's elements are; None: all of all tokens are
    # (T, layers * hidden), the residual stream as it enters each of the context's `aux_layers`;
    # None: there are none.
    aux: Tensor | None = None


class CrossAttentionBackend(Protocol):
    """The other sequences of a pass: see `antiphon.layers.cross_attention`.

    Axes: T tokens of the pass, S tokens of the sequences that come with it, H heads, D head size.
    """

    @property
    def sources(self) -> Tensor | None:
        """(S, hidden) the sequences that come with this pass; None: there are none."""
        ...

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Cache a layer's keys and values (S, H, D) of the sequences that come with this pass."""
        ...

    def attend(self, layer: int, queries: Tensor, scale: float) -> Tensor:
        """Attend to all of the sequence of each token's request: (T, H, D)  ->  (T, H, D)."""
        ...


Mixer = Callable[["ForwardContext", Tensor], Tensor]
"""What mixes the tokens of each sequence: see `antiphon.layers.sublayer.Sublayer`."""

FusedForward = Callable[[Tensor], tuple[Tensor, Tensor | None, Tensor | None]]
"""All layers of a forward pass and the final norm in one call, with the bits of layer by layer:
residual (T, hidden), overwritten  ->  `HiddenStates`."""


class ExpertRanks(Protocol):
    """The ranks over which the experts of every layer are spread, as a layer reaches them."""

    def dispatch(self, x: Tensor) -> Tensor:
        """Tokens of this rank (T, D)  ->  those that its experts may have to process, (N, D)."""
        ...

    def combine(self, made: Tensor) -> Tensor:
        """What its experts made of these  ->  what those of all ranks made of its tokens, (T, D).

        `made` may be overwritten.
        """
        ...


class LocalExperts:
    """All experts are on this rank."""

    def dispatch(self, x: Tensor) -> Tensor:
        return x

    def combine(self, made: Tensor) -> Tensor:
        return made


class SummedExperts:
    """Every rank has all tokens, and a part of the experts: of their number, width, or both."""

    def __init__(self, tp: Tp) -> None:
        self._tp = tp

    def dispatch(self, x: Tensor) -> Tensor:
        return x

    def combine(self, made: Tensor) -> Tensor:
        return self._tp.all_reduce(made)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """One forward pass."""

    ops: Ops  # the kernels chosen for this device
    tp: Tp  # the tensor-parallel group
    experts: ExpertRanks
    attend: AttentionBackend  # attention over the paged KV cache, with RoPE
    recur: RecurrenceBackend | None = None  # over recurrent states; unset: no layer has one
    # Attention over the latent cache; unset: no layer has one.
    attend_latent: LatentAttentionBackend | None = None
    cross: CrossAttentionBackend | None = None  # unset: no layer attends to another sequence
    positions: Tensor | None = None  # (T,) int32, of each token in its sequence
    # (T,) int32, the type of each token; unset: all are of type 0.
    token_types: Tensor | None = None
    fused: FusedForward | None = None  # unset: this pass runs layer by layer
    attention: AttentionRows | None = None  # unset: this rank attends to all tokens
    aux_layers: tuple[int, ...] = ()  # ascending; see `HiddenStates.aux`

    def mix(self, mixer: Mixer, x: Tensor) -> Tensor:
        """What a mixer makes of all tokens: x (T, D)  ->  (T, D), the same on every rank.

        Where groups of ranks attend to different tokens, each gives the others what it has made
        of its own; a group without tokens takes part with nothing but zeros.
        """
        if (own := self.attention) is None:
            return mixer(self, x)
        mixed = torch.zeros_like(x)
        if own.ctx is not None:
            made = mixer(own.ctx, x[own.tokens])
            if own.ctx.tp.rank == 0:  # the others of the group have the same
                mixed[own.tokens] = made
        return self.tp.all_reduce(mixed)


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """The tokens of a pass to which this rank attends, with the other ranks of its group."""

    tokens: slice  # of those of the pass
    ctx: ForwardContext | None  # of these tokens and the ranks of the group; None: of no token
