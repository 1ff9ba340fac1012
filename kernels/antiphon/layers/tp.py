"""Tensor parallelism for layers: the rank, and two collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Tp(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks; `x` may be overwritten."""
        ...

    def all_gather(self, x: Tensor) -> Tensor: ...


class SingleRank:
    rank = 0
    ranks = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x
