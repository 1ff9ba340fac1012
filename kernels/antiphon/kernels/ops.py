"""The operations of a decoder, each chosen once for the device that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from antiphon.kernels.activation import silu_mul
from antiphon.kernels.attention import AttentionRows, paged_attention
from antiphon.kernels.kv import kv_store
from antiphon.kernels.norm import add_rmsnorm, rmsnorm
from antiphon.kernels.op import Choice, Device, KernelUnavailable, Op
from antiphon.kernels.rotary import rotary
from antiphon.kernels.sampling import draw, greedy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

REGISTRY: Mapping[str, Op[..., object]] = {
    op.name: op
    for op in (rmsnorm, add_rmsnorm, rotary, silu_mul, paged_attention, kv_store, greedy, draw)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """What layers and sampling call. `choices` says which backend each one is, and why."""

    rmsnorm: Callable[[Tensor, Tensor, float], Tensor]
    add_rmsnorm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    paged_attention: Callable[[Tensor, Tensor, Tensor, AttentionRows, float], Tensor]
    kv_store: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    greedy: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    choices: tuple[Choice[..., object], ...]


def select(device: Device, forced: Mapping[str, str] | None = None) -> Ops:
    """Choose a backend an op; `forced` names one by op name.

    Raises:
        KernelUnavailable: A forced backend cannot run here, or there is no op of that name.
    """
    wanted = dict(forced or {})
    if unknown := sorted(wanted.keys() - REGISTRY.keys()):
        raise KernelUnavailable(f"no op is called {unknown[0]!r}; there are {sorted(REGISTRY)}")
    choices: list[Choice[..., object]] = []

    def choose(op: Op[P, R]) -> Callable[P, R]:
        choice = op.select(device, wanted.get(op.name))
        choices.append(choice)
        return choice.call

    return Ops(
        rmsnorm=choose(rmsnorm),
        add_rmsnorm=choose(add_rmsnorm),
        rotary=choose(rotary),
        silu_mul=choose(silu_mul),
        paged_attention=choose(paged_attention),
        kv_store=choose(kv_store),
        greedy=choose(greedy),
        draw=choose(draw),
        choices=tuple(choices),
    )
