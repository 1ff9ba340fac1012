"""Layers with a recurrent state instead of a KV cache: Mamba 2 and the gated delta net."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import torch

from antiphon.kernels.recurrent import Recurrence, StateSpec
from antiphon.layers.linear import CheckpointLayout, ColumnLinear, LinearPart, RowLinear
from antiphon.layers.sublayer import LayerBuildContext, Sublayer
from antiphon.layers.weights import Module, WeightSource, replicated_source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from antiphon.kernels.cpu.linear import CompiledLinear
    from antiphon.layers.context import ForwardContext


class HeadVector(Module):
    """A float32 scalar for each head of this rank."""

    def __init__(self, site: LayerBuildContext, tensor: str, heads: int) -> None:
        tp = site.build.tp
        share = site.build.share(heads, site.tensor_name(tensor))
        self.value = torch.empty(share, dtype=torch.float32, device=site.build.device)
        self._name, self._heads = site.tensor_name(tensor), heads
        self._own = slice(tp.rank * share, (tp.rank + 1) * share)

    def sources(self) -> Iterator[WeightSource]:
        load = partial(_copy_rows, self.value, (self._own,))
        yield WeightSource(self._name, (self._heads,), load)


class ShortConv(Module):
    """The weight of a causal convolution whose channels are concatenated outputs of linears."""

    def __init__(
        self,
        site: LayerBuildContext,
        tensor: str,
        taps: int,
        parts: tuple[LinearPart, ...],
        *,
        bias: bool,
    ) -> None:
        tp = site.build.tp
        channels = sum(part.piece() for part in parts)
        self.weight = site.build.empty(taps, channels)
        self.bias = site.build.empty(channels) if bias else None
        self._name = site.tensor_name(tensor)
        self._channels = sum(part.outputs for part in parts)
        starts = [part.start(tp.rank, tp.ranks) for part in parts]
        before = [sum(part.outputs for part in parts[:index]) for index in range(len(parts))]
        self._own = [
            slice(first + start, first + start + part.piece())
            for first, start, part in zip(before, starts, parts, strict=True)
        ]

    def sources(self) -> Iterator[WeightSource]:
        shape = (self._channels, 1, len(self.weight))
        load = partial(_copy_rows, self.weight.t(), self._own)
        yield WeightSource(f"{self._name}.weight", shape, load)
        if self.bias is not None:
            load = partial(_copy_rows, self.bias, self._own)
            yield WeightSource(f"{self._name}.bias", (self._channels,), load)


def _copy_rows(into: Tensor, rows: Sequence[slice], tensor: Tensor) -> None:
    into.copy_(torch.cat([tensor[own] for own in rows]).view(into.shape))


Scales = tuple[float, float, float, float, float]


class RecurrentMixer(Sublayer):
    """A recurrent layer: a projection, the recurrence over states, a projection back."""

    kernels = frozenset({"recurrent.layer"})
    layer: int
    inputs: ColumnLinear
    recurrence: Recurrence
    out: RowLinear

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        assert ctx.recur is not None, "a pass without states"
        return self.out(ctx, ctx.recur(self.layer, self.inputs(ctx, x), self.recurrence))

    @property
    def packed(self) -> tuple[CompiledLinear, CompiledLinear] | None:
        inputs, out = self.inputs.packed, self.out.packed
        return None if inputs is None or out is None else (inputs, out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec:
    """Mamba 2, as by Dao and Gu (arXiv:2405.21060)."""

    heads: int  # each with its own decay and `head_size` channels
    head_size: int
    groups: int  # of heads that share B and C
    state_size: int  # state elements of a channel
    taps: int  # of the convolution
    conv_bias: bool = True
    input_bias: bool = False  # of the projection to gate, x, B, C and step
    out_bias: bool = False
    norm_eps: float | None = None  # of the norm after the recurrence; None: no norm, only the gate
    gate_first: bool = True  # whether the gate multiplies the input of the norm, not its result
    step_limits: tuple[float, float] = (0.0, float("inf"))  # step sizes are clamped to these
    # Multipliers of the projected gate, x, B, C and step.
    scales: Scales = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def width(self) -> int:
        return self.heads * self.head_size

    @property
    def cache(self) -> StateSpec:
        return StateSpec(
            channels=self.width,
            shared=2 * self.groups * self.state_size,
            groups=self.groups,
            taps=self.taps,
            heads=self.heads,
            rows=self.state_size,
            columns=self.head_size,
        )


class Mamba2(RecurrentMixer):
    """One layer. Heads are sharded over ranks; B and C of a group are where its heads are."""

    def __init__(self, site: LayerBuildContext, spec: Mamba2Spec) -> None:
        build, ranks = site.build, site.build.tp.ranks
        self.layer = site.layer
        self._spec = spec
        self._heads = build.share(spec.heads, f"{site.name}.mamba")
        self._groups = spec.groups // min(ranks, spec.groups)
        if spec.norm_eps is not None:
            build.share(spec.groups, f"{site.name}.mamba: groups that are normalised")
        parts = _mamba2_parts(site, spec)
        self.inputs = site.column("mamba.inputs", parts, bias=spec.input_bias)
        self._conv = ShortConv(site, "mamba.conv1d", spec.taps, parts[1:4], bias=spec.conv_bias)
        self._decay = HeadVector(site, "mamba.A_log", spec.heads)
        self._skip = HeadVector(site, "mamba.D", spec.heads)
        self._step_bias = HeadVector(site, "mamba.dt_bias", spec.heads)
        self._norm = None if spec.norm_eps is None else build.empty(spec.width // ranks)
        self._norm_name = site.tensor_name("mamba.norm")
        self._first = build.tp.rank * (spec.width // ranks)
        self.out = site.row("mamba.out_proj", spec.width, bias=spec.out_bias)
        vectors = (self._decay, self._skip, self._step_bias)
        self.children = (self.inputs, self._conv, *vectors, self.out)
        self.recurrence = Recurrence(
            kind="ssd",
            key_heads=self._groups,
            heads=self._heads,
            rows=spec.state_size,
            columns=spec.head_size,
            conv=self._conv.weight,
            conv_bias=self._conv.bias,
            decay_log=self._decay.value,
            step_bias=self._step_bias.value,
            skip=self._skip.value,
            step_limits=spec.step_limits,
            scales=_scales(parts, spec.scales, build.dtype, build.device),
            norm=self._norm,
            norm_part=self._heads * spec.head_size // self._groups,
            norm_eps=spec.norm_eps or 0.0,
            gate_first=spec.gate_first,
        )

    def sources(self) -> Iterator[WeightSource]:
        yield from super().sources()
        if self._norm is not None:
            own = slice(self._first, self._first + len(self._norm))
            load = partial(_copy_rows, self._norm, (own,))
            yield WeightSource(f"{self._norm_name}.weight", (self._spec.width,), load)


def _mamba2_parts(site: LayerBuildContext, spec: Mamba2Spec) -> tuple[LinearPart, ...]:
    """Gate, x, B, C and step of each token, in this order; the convolution is over x, B and C."""
    ranks, name = site.build.tp.ranks, site.tensor_name("mamba.in_proj")
    shared = spec.groups * spec.state_size
    sizes = (spec.width, spec.width, shared, shared, spec.heads)
    shards = (ranks, ranks, min(ranks, spec.groups), min(ranks, spec.groups), ranks)
    return tuple(
        LinearPart(name, size, shard, CheckpointLayout(run=sum(sizes), first=sum(sizes[:place])))
        for place, (size, shard) in enumerate(zip(sizes, shards, strict=True))
    )


def _scales(
    parts: tuple[LinearPart, ...], scales: Scales, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    if all(scale == 1.0 for scale in scales):
        return None
    runs = [torch.full((part.piece(),), scale) for part, scale in zip(parts, scales, strict=True)]
    return torch.cat(runs).to(dtype=dtype, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec:
    """A gated delta net, as in Qwen3-Next and Qwen3.5 (arXiv:2412.06464)."""

    key_heads: int  # each serves the same number of adjacent value heads
    value_heads: int
    key_size: int
    value_size: int
    taps: int  # of the convolution
    norm_eps: float  # of the norm of each value head
    # Whether gates, beta and decay have tensors of their own beside queries, keys and values, as in
    # Qwen3.5; else two tensors have all of them, key head by key head.
    separate: bool = False

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


class GatedDelta(RecurrentMixer):
    """One layer. Key heads are sharded over ranks, each with the value heads that it serves."""

    def __init__(self, site: LayerBuildContext, spec: GatedDeltaSpec) -> None:
        build = site.build
        self.layer = site.layer
        self._spec = spec
        self._key_heads = build.share(spec.key_heads, f"{site.name}.linear_attn")
        self._value_heads = build.share(spec.value_heads, f"{site.name}.linear_attn")
        parts = _gated_delta_parts(site, spec)
        self.inputs = site.column("linear_attn.inputs", parts, bias=False)
        self._conv = ShortConv(site, "linear_attn.conv1d", spec.taps, parts[:3], bias=False)
        self._decay = HeadVector(site, "linear_attn.A_log", spec.value_heads)
        self._step_bias = HeadVector(site, "linear_attn.dt_bias", spec.value_heads)
        self._norm_name = site.tensor_name("linear_attn.norm")
        self._norm = build.empty(spec.value_size)
        self.out = site.row("linear_attn.out_proj", spec.value_heads * spec.value_size, bias=False)
        self.children = (self.inputs, self._conv, self._decay, self._step_bias, self.out)
        self.recurrence = Recurrence(
            kind="gated_delta",
            key_heads=self._key_heads,
            heads=self._value_heads,
            rows=spec.key_size,
            columns=spec.value_size,
            conv=self._conv.weight,
            conv_bias=None,
            decay_log=self._decay.value,
            step_bias=self._step_bias.value,
            norm=self._norm,
            norm_part=spec.value_size,
            norm_eps=spec.norm_eps,
        )

    def sources(self) -> Iterator[WeightSource]:
        yield from super().sources()
        yield from replicated_source(f"{self._norm_name}.weight", self._norm)


def _gated_delta_parts(site: LayerBuildContext, spec: GatedDeltaSpec) -> tuple[LinearPart, ...]:
    """Queries, keys, values, gates, beta and decay; value heads are in the order of key heads.

    The convolution is over all queries, then all keys, then all values.
    """
    ranks, heads, shared = site.build.tp.ranks, spec.key_heads, spec.value_heads // spec.key_heads
    keys, values = spec.key_size, shared * spec.value_size  # of each key head
    runs, tensors = heads, _BY_KEY_HEAD
    if spec.separate:
        runs, tensors = 1, _SEPARATE
    sizes = iter(heads * size // runs for size in (keys, keys, values, values, shared, shared))
    return tuple(
        LinearPart(
            site.tensor_name(name),
            runs * size,
            ranks,
            CheckpointLayout(run=sum(parts), first=sum(parts[:place]), runs=runs),
        )
        for name, count in tensors
        for parts in [tuple(islice(sizes, count))]
        for place, size in enumerate(parts)
    )


_BY_KEY_HEAD = (("linear_attn.in_proj_qkvz", 4), ("linear_attn.in_proj_ba", 2))
_SEPARATE = (
    ("linear_attn.in_proj_qkv", 3),
    ("linear_attn.in_proj_z", 1),
    ("linear_attn.in_proj_b", 1),
    ("linear_attn.in_proj_a", 1),
)
"""Tensors of a checkpoint, and how many of the parts each has."""
