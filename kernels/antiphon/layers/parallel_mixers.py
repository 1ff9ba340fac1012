"""Parallel mixers: several mixers read the same stream, and their outputs are added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.layers.attention import AttentionSpec
from antiphon.layers.recurrent import GatedDeltaSpec, Mamba2Spec
from antiphon.layers.sublayer import LayerBuildContext, Sublayer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from antiphon.layers.context import ForwardContext

BranchSpec = AttentionSpec | Mamba2Spec | GatedDeltaSpec
"""A mixer that may be a branch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerBranch:
    mixer: BranchSpec
    scale_in: float = 1.0
    scale_out: float = 1.0


@dataclass(frozen=True, slots=True)
class ParallelMixersSpec:
    branches: tuple[MixerBranch, ...]


class ParallelMixers(Sublayer):
    def __init__(
        self,
        site: LayerBuildContext,
        spec: ParallelMixersSpec,
        build: Callable[[LayerBuildContext, BranchSpec], Sublayer],
    ) -> None:
        self.branches = [(branch, build(site, branch.mixer)) for branch in spec.branches]
        self.children = tuple(block for _, block in self.branches)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        total: Tensor | None = None
        for branch, block in self.branches:
            y = block(ctx, x if branch.scale_in == 1.0 else x * branch.scale_in)
            y = y if branch.scale_out == 1.0 else y * branch.scale_out
            total = y if total is None else total + y
        assert total is not None, "no branches"
        return total
