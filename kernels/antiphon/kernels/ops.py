"""The operations of a decoder, each with the backend chosen for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec, TypeVar

from antiphon.kernels.activation import (
    activate,
    clamped_swish_mul,
    gate,
    sigmoid_mul,
    silu_mul,
    soft_capped,
)
from antiphon.kernels.attention import bidirectional_attention, paged_attention
from antiphon.kernels.decode_rows import decode_rows
from antiphon.kernels.experts import experts
from antiphon.kernels.latent import store_latents
from antiphon.kernels.linear_fp8 import linear_fp8
from antiphon.kernels.linear_grouped import linear_grouped
from antiphon.kernels.linear_int8 import linear_int8
from antiphon.kernels.linear_tiled import linear_heads, linear_tiled
from antiphon.kernels.norm import (
    add_rmsnorm,
    finite_rows,
    layernorm,
    rmsnorm,
    rmsnorm_wide,
    squares,
)
from antiphon.kernels.op import REGISTRY, BackendChoice, DeviceCapability, KernelUnavailable, Op
from antiphon.kernels.pages import gather, scatter
from antiphon.kernels.recurrent import recurrence
from antiphon.kernels.rotary import qk_norm_rope_store
from antiphon.kernels.routing import combine, route
from antiphon.kernels.sampling import (
    argmax,
    bias,
    logsumexp,
    mask,
    penalize,
    record_futures,
    resolve_futures,
    sample,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

P = ParamSpec("P")
R = TypeVar("R")


class Ops:
    """The operations that layers and sampling call; `choices` lists their backends with reasons."""

    def __init__(
        self, device: DeviceCapability, forced: Mapping[str, str], *, invariant: bool
    ) -> None:
        choices: list[BackendChoice[..., object]] = []

        def choose(op: Op[P, R]) -> Callable[P, R]:
            choice = op.select(device, forced.get(op.name), invariant=invariant)
            choices.append(choice)
            return choice.call

        self.rmsnorm = choose(rmsnorm)
        self.add_rmsnorm = choose(add_rmsnorm)
        self.rmsnorm_wide = choose(rmsnorm_wide)
        self.layernorm = choose(layernorm)
        self.squares = choose(squares)
        self.silu_mul = choose(silu_mul)
        self.gate = choose(gate)
        self.activate = choose(activate)
        self.clamped_swish_mul = choose(clamped_swish_mul)
        self.sigmoid_mul = choose(sigmoid_mul)
        self.soft_capped = choose(soft_capped)
        self.linear_fp8 = choose(linear_fp8)
        self.linear_grouped = choose(linear_grouped)
        self.linear_int8 = choose(linear_int8)
        self.linear_tiled = choose(linear_tiled)
        self.linear_heads = choose(linear_heads)
        self.route = choose(route)
        self.combine = choose(combine)
        self.experts = choose(experts)
        self.qk_norm_rope_store = choose(qk_norm_rope_store)
        self.store_latents = choose(store_latents)
        self.paged_attention = choose(paged_attention)
        self.bidirectional_attention = choose(bidirectional_attention)
        self.recurrence = choose(recurrence)
        self.finite_rows = choose(finite_rows)
        self.penalize = choose(penalize)
        self.mask = choose(mask)
        self.bias = choose(bias)
        self.logsumexp = choose(logsumexp)
        self.argmax = choose(argmax)
        self.sample = choose(sample)
        self.resolve_futures = choose(resolve_futures)
        self.record_futures = choose(record_futures)
        self.decode_rows = choose(decode_rows)
        self.gather_pages = choose(gather)
        self.scatter_pages = choose(scatter)
        self.choices = tuple(choices)


def select(
    device: DeviceCapability, forced: Mapping[str, str] | None = None, *, invariant: bool = False
) -> Ops:
    """Choose a backend for each op; `forced` names one by op name.

    `invariant`: the ways of backends that are batch-invariant, where they have some.

    Raises:
        KernelUnavailable: A forced backend cannot run here, or there is no op of that name.
    """
    wanted = dict(forced or {})
    if unknown := sorted(wanted.keys() - REGISTRY.keys()):
        raise KernelUnavailable(f"no op is called {unknown[0]!r}; there are {sorted(REGISTRY)}")
    return Ops(device, wanted, invariant=invariant)
