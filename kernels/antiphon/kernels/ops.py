"""The operations of a decoder, each with the backend chosen for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from antiphon.kernels.activation import (
    ActivationKind,
    activate,
    clamped_swish_mul,
    gate,
    silu_mul,
)
from antiphon.kernels.attention import AttentionMetadata, paged_attention, softcap_sink_attention
from antiphon.kernels.bidirectional import bidirectional_attention
from antiphon.kernels.causal_conv import causal_conv
from antiphon.kernels.experts import combine
from antiphon.kernels.finite import finite_rows
from antiphon.kernels.gated_delta import gated_delta
from antiphon.kernels.norm import (
    add_rmsnorm,
    gated_rmsnorm,
    layernorm,
    rmsnorm,
    rmsnorm_wide,
    squares,
)
from antiphon.kernels.op import BackendChoice, DeviceCapability, KernelUnavailable, Op
from antiphon.kernels.qk_norm_rope import QkNormWeights, qk_norm_rope_store
from antiphon.kernels.routing import RoutingSpec, route
from antiphon.kernels.sampling import argmax, bias, logsumexp, mask, penalize, sample
from antiphon.kernels.ssd import ssd

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from antiphon.kernels.kv import KvScales
    from antiphon.kernels.states import StateMetadata

P = ParamSpec("P")
R = TypeVar("R")

REGISTRY: Mapping[str, Op[..., object]] = {
    op.name: op
    for op in (
        rmsnorm,
        add_rmsnorm,
        rmsnorm_wide,
        layernorm,
        squares,
        silu_mul,
        gate,
        activate,
        clamped_swish_mul,
        route,
        combine,
        qk_norm_rope_store,
        paged_attention,
        softcap_sink_attention,
        bidirectional_attention,
        gated_rmsnorm,
        causal_conv,
        ssd,
        gated_delta,
        finite_rows,
        penalize,
        mask,
        bias,
        logsumexp,
        argmax,
        sample,
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """The operations that layers and sampling call; `choices` lists their backends with reasons."""

    rmsnorm: Callable[[Tensor, Tensor, float], Tensor]
    add_rmsnorm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rmsnorm_wide: Callable[[Tensor, Tensor, float], Tensor]
    layernorm: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]
    squares: Callable[[Tensor], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    gate: Callable[[Tensor, ActivationKind], Tensor]
    activate: Callable[[Tensor, ActivationKind], Tensor]
    clamped_swish_mul: Callable[[Tensor, float, float], Tensor]
    route: Callable[[Tensor, Tensor | None, RoutingSpec], tuple[Tensor, Tensor]]
    combine: Callable[[Tensor, Tensor, Tensor], Tensor]
    qk_norm_rope_store: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, QkNormWeights | None, KvScales], Tensor
    ]
    paged_attention: Callable[[Tensor, Tensor, Tensor, AttentionMetadata, float, KvScales], Tensor]
    softcap_sink_attention: Callable[
        [Tensor, Tensor, Tensor, AttentionMetadata, float, float | None, Tensor | None, KvScales],
        Tensor,
    ]
    bidirectional_attention: Callable[
        [Tensor, Tensor, Tensor, Sequence[int], float, int | None], Tensor
    ]
    gated_rmsnorm: Callable[[Tensor, Tensor, Tensor, float, int, bool], Tensor]
    causal_conv: Callable[[Tensor, Tensor, Tensor | None, Tensor, StateMetadata], Tensor]
    ssd: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, StateMetadata], Tensor]
    gated_delta: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, StateMetadata], Tensor]
    finite_rows: Callable[[Tensor], Tensor | None]
    penalize: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    mask: Callable[[Tensor, Tensor, Tensor], None]
    bias: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    logsumexp: Callable[[Tensor, Tensor], Tensor]
    argmax: Callable[[Tensor], Tensor]
    sample: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    choices: tuple[BackendChoice[..., object], ...]


def select(device: DeviceCapability, forced: Mapping[str, str] | None = None) -> Ops:
    """Choose a backend for each op; `forced` names one by op name.

    Raises:
        KernelUnavailable: A forced backend cannot run here, or there is no op of that name.
    """
    wanted = dict(forced or {})
    if unknown := sorted(wanted.keys() - REGISTRY.keys()):
        raise KernelUnavailable(f"no op is called {unknown[0]!r}; there are {sorted(REGISTRY)}")
    choices: list[BackendChoice[..., object]] = []

    def choose(op: Op[P, R]) -> Callable[P, R]:
        choice = op.select(device, wanted.get(op.name))
        choices.append(choice)
        return choice.call

    return Ops(
        rmsnorm=choose(rmsnorm),
        add_rmsnorm=choose(add_rmsnorm),
        rmsnorm_wide=choose(rmsnorm_wide),
        layernorm=choose(layernorm),
        squares=choose(squares),
        silu_mul=choose(silu_mul),
        gate=choose(gate),
        activate=choose(activate),
        clamped_swish_mul=choose(clamped_swish_mul),
        route=choose(route),
        combine=choose(combine),
        qk_norm_rope_store=choose(qk_norm_rope_store),
        paged_attention=choose(paged_attention),
        softcap_sink_attention=choose(softcap_sink_attention),
        bidirectional_attention=choose(bidirectional_attention),
        gated_rmsnorm=choose(gated_rmsnorm),
        causal_conv=choose(causal_conv),
        ssd=choose(ssd),
        gated_delta=choose(gated_delta),
        finite_rows=choose(finite_rows),
        penalize=choose(penalize),
        mask=choose(mask),
        bias=choose(bias),
        logsumexp=choose(logsumexp),
        argmax=choose(argmax),
        sample=choose(sample),
        choices=tuple(choices),
    )
