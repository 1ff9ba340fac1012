"""Shared parts of layers with a recurrent state: small weights, sharded by head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from antiphon.layers.weights import Module, WeightSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.layers.linear import LinearPart
    from antiphon.layers.sublayer import LayerBuildContext


class HeadVector(Module):
    """A float32 scalar for each head of this rank."""

    def __init__(self, site: LayerBuildContext, tensor: str, heads: int) -> None:
        tp = site.build.tp
        share = site.build.share(heads, site.tensor_name(tensor))
        self.value = torch.empty(share, dtype=torch.float32, device=site.build.device)
        self._name, self._heads = site.tensor_name(tensor), heads
        self._own = slice(tp.rank * share, (tp.rank + 1) * share)

    def sources(self) -> Iterator[WeightSource]:
        yield WeightSource(self._name, (self._heads,), self._load)

    def _load(self, tensor: Tensor) -> None:
        self.value.copy_(tensor[self._own])


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
        self.weight = site.build.empty(channels, taps)
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
        shape = (self._channels, 1, self.weight.shape[1])
        yield WeightSource(f"{self._name}.weight", shape, self._load)
        if self.bias is not None:
            yield WeightSource(f"{self._name}.bias", (self._channels,), self._load_bias)

    def _load(self, tensor: Tensor) -> None:
        self.weight.copy_(torch.cat([tensor[own, 0] for own in self._own]))

    def _load_bias(self, tensor: Tensor) -> None:
        assert self.bias is not None, "no bias was asked for"
        self.bias.copy_(torch.cat([tensor[own] for own in self._own]))
