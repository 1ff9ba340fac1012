"""The pipeline of a worker: the residual stream passes from each stage to the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Link(Protocol):
    """From a rank of one stage to that of the next one with the same shard."""

    def send(self, x: Tensor) -> None: ...

    def receive(self, out: Tensor) -> None: ...


class Pipeline:
    """The stages as one rank has them: `antiphon.layers.weights.Pp`."""

    def __init__(self, stage: int, stages: int, before: Link | None, after: Link | None) -> None:
        self.stage, self.stages = stage, stages
        self._before, self._after = before, after

    def send(self, x: Tensor) -> None:
        assert self._after is not None, "the last stage sends nothing"
        self._after.send(x.contiguous())

    def receive(self, out: Tensor) -> None:
        assert self._before is not None, "the first stage receives nothing"
        self._before.receive(out)
