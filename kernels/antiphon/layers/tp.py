"""Tensor parallelism for layers: the rank, and two collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


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


class GroupRank:
    """One rank of a torch process group (gloo on CPU, NCCL on GPUs)."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.rank = group.rank()
        self.ranks = group.size()

    def all_reduce(self, x: Tensor) -> Tensor:
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=-1)
