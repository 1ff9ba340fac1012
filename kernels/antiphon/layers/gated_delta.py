"""Gated delta net: linear attention with a recurrent state instead of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)

from antiphon.kernels.states import StateSpec
from antiphon.layers.linear import CheckpointLayout, LinearPart
from antiphon.layers.recurrent import HeadVector, ShortConv
from antiphon.layers.sublayer import LayerBuildContext, Sublayer
from antiphon.layers.weights import replicated_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.layers.context import ForwardContext
    from antiphon.layers.weights import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNames:
    """Names of a layer's tensors in the checkpoint, relative to the layer.

    `inputs` has query, key, values and gates of each key head in turn, `rates` the beta and decay
    of its value heads; `conv` has all queries, then all keys, then all values.
    """

    inputs: str = "linear_attn.in_proj_qkvz"
    rates: str = "linear_attn.in_proj_ba"
    conv: str = "linear_attn.conv1d"
    decay: str = "linear_attn.A_log"
    step_bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm"
    out: str = "linear_attn.out_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec:
    """A gated delta net, as in Qwen3-Next (arXiv:2412.06464)."""

    key_heads: int  # each serves the same number of adjacent value heads
    value_heads: int
    key_size: int
    value_size: int
    taps: int  # of the convolution
    norm_eps: float  # of the norm of each value head
    names: GatedDeltaNames = field(default_factory=GatedDeltaNames)

    @property
    def cache(self) -> StateSpec:
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        return StateSpec(
            channels=2 * keys + values,
            taps=self.taps,
            heads=self.value_heads,
            rows=self.key_size,
            columns=self.value_size,
        )


class GatedDelta(Sublayer):
    """One layer. Axes: T tokens, Y key heads, H value heads, K key size, V value size.

    Key heads are sharded over ranks, each with the value heads that it serves.
    """

    kernels = frozenset({"recurrent.conv", "recurrent.gated_delta", "norm.gated_rmsnorm"})

    def __init__(self, site: LayerBuildContext, spec: GatedDeltaSpec) -> None:
        build, names = site.build, spec.names
        self._layer = site.layer
        self._spec = spec
        self._key_heads = build.share(spec.key_heads, f"{site.name}.linear_attn")
        self._value_heads = build.share(spec.value_heads, f"{site.name}.linear_attn")
        parts = _parts(site, spec)
        self._inputs = site.column("linear_attn.inputs", parts, bias=False)
        self._conv = ShortConv(site, names.conv, spec.taps, parts[:3], bias=False)
        self._decay = HeadVector(site, names.decay, spec.value_heads)
        self._step_bias = HeadVector(site, names.step_bias, spec.value_heads)
        self._norm_name = site.tensor_name(names.norm)
        self._norm = build.empty(spec.value_size)
        self._out = site.row(names.out, spec.value_heads * spec.value_size, bias=False)
        self.children = (self._inputs, self._conv, self._decay, self._step_bias, self._out)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        assert ctx.states_of is not None, "a pass without states"
        states, rows = ctx.states_of(self._layer)
        projected = self._inputs(ctx, x)
        seen, width = self._conv.weight.shape[0], self._value_heads * self._spec.value_size
        gate, rates = projected[:, seen : seen + width], projected[:, seen + width :]
        mixed = ctx.ops.causal_conv(
            projected[:, :seen], self._conv.weight, None, states.conv_states, rows
        )
        y = ctx.ops.gated_delta(*self._recurrence(mixed, rates), states.recurrent_states, rows)
        normed = ctx.ops.gated_rmsnorm(
            y.flatten(0, 1),
            gate.reshape(-1, self._spec.value_size),
            self._norm,
            self._spec.norm_eps,
            1,
            False,  # noqa: FBT003 (kernels take no names)
        )
        return self._out(ctx, normed.view(len(x), -1))

    def sources(self) -> Iterator[WeightSource]:
        yield from super().sources()
        yield from replicated_source(f"{self._norm_name}.weight", self._norm)

    def _recurrence(
        self, mixed: Tensor, rates: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        keys = self._key_heads * self._spec.key_size
        q, k = mixed[:, :keys], mixed[:, keys : 2 * keys]
        heads = (len(mixed), self._key_heads, -1)
        v = mixed[:, 2 * keys :].view(len(mixed), self._value_heads, -1)
        learning, forgetting = rates.float().chunk(2, dim=-1)
        decay = -torch.exp(self._decay.value) * F.softplus(forgetting + self._step_bias.value)
        return q.view(heads), k.view(heads), v, decay, torch.sigmoid(learning)


def _parts(site: LayerBuildContext, spec: GatedDeltaSpec) -> tuple[LinearPart, ...]:
    ranks, shared = site.build.tp.ranks, spec.value_heads // spec.key_heads
    values = shared * spec.value_size
    tensors = (
        (spec.names.inputs, (spec.key_size, spec.key_size, values, values)),
        (spec.names.rates, (shared, shared)),
    )
    return tuple(
        LinearPart(
            site.tensor_name(name),
            spec.key_heads * size,
            ranks,
            CheckpointLayout(run=sum(sizes), first=sum(sizes[:place]), runs=spec.key_heads),
        )
        for name, sizes in tensors
        for place, size in enumerate(sizes)
    )
