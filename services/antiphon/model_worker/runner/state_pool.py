"""The recurrent states of a cache group as tensors.

Axes: L layers of the group, S places, K taps of a convolution, C its channels, H matrices of a
recurrence, I rows and J columns of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.states import StateSpec
    from antiphon.layers.weights import BuildContext
    from antiphon.model_worker.cache.groups import CacheGroup


class StatePool:
    """Convolution states, (L, S, K - 1, C), and recurrent states, (L, S, H, I, J).

    A place is undefined until it is written as a whole, and is read only after that.
    """

    def __init__(self, group: CacheGroup, spec: StateSpec, build: BuildContext) -> None:
        self.group = group
        ranks, places = build.tp.ranks, (len(group.layers), group.pages_total)
        self._convolved = torch.zeros(
            (*places, *spec.convolved(ranks)), dtype=build.dtype, device=build.device
        )
        self._matrices = torch.zeros(
            (*places, *spec.matrices(ranks)), dtype=torch.float32, device=build.device
        )

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Both of the group's `index`-th layer: (S, K - 1, C) and (S, H, I, J)."""
        return self._convolved[index], self._matrices[index]
