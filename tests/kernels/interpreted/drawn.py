"""A device whose streams have computed as much as a seed says, whenever the host looks.

Streams go on while the host launches, and while it waits for one of them, in any order. Without a
seed nothing is computed before it is waited for: the slowest device there can be. All of it is
computed in the thread of the host, so a seed gives the same again.
"""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from antiphon.kernels.stream import InterpretedStream
from antiphon.kernels.triton.tape import play

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.kernels.triton.tape import Tape

SLOTS = 64
PACES = (0.0, 0.0, 0.5, 0.95, 1.0)
"""The chance that a stream makes one more call: none, a few, some, or all there are."""
CHANGES = 0.2
"""The chance that a stream has another pace from now on."""


class DrawnDevice:
    """Its queues are those of its streams. For one thread.

    Attributes:
        played: How many tapes have been played.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._queues: list[DrawnQueue] = []
        self.played = 0

    def queue(self) -> DrawnQueue:
        queue = DrawnQueue(self)
        self._queues.append(queue)
        return queue

    def go_on(self) -> None:
        """Let each stream compute while the host does something else."""
        if self._random is None:
            return
        for queue in self._queues:
            if self._random.random() < CHANGES:
                queue.pace = self._random.choice(PACES)
        going = list(self._queues)
        while going:
            queue = self._random.choice(going)
            if self._random.random() >= queue.pace or not queue.step():
                going.remove(queue)

    def wait(self, queue: DrawnQueue, played: Future[None]) -> None:
        """Let a stream compute up to the end of a tape; others compute meanwhile, or do not."""
        while not played.done():
            queue.step()
            for other in self._queues:
                if self._random is not None and self._random.random() < other.pace:
                    other.step()


class DrawnQueue:
    """Plays the tapes of one stream."""

    pace = 0.0

    def __init__(self, device: DrawnDevice) -> None:
        self._device = device
        self._tapes: deque[tuple[DrawnFuture, deque[Callable[[], object]]]] = deque()

    def put(self, tape: Tape) -> DrawnFuture:
        played = DrawnFuture(self._device, self)
        self._tapes.append((played, deque(tape.calls)))
        self._device.go_on()
        return played

    def step(self) -> bool:
        """Make the next call; whether there was one."""
        if not self._tapes:
            return False
        played, calls = self._tapes[0]
        try:
            if calls:
                play(calls.popleft())
                if calls:
                    return True
            played.set_result(None)
        except Exception as error:  # noqa: BLE001  # raised where it is waited for
            played.set_exception(error)
        self._tapes.popleft()
        self._device.played += 1
        return True

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def beside(self) -> DrawnQueue:
        return self._device.queue()


class DrawnFuture(Future[None]):
    def __init__(self, device: DrawnDevice, queue: DrawnQueue) -> None:
        super().__init__()
        self._device, self._queue = device, queue

    def result(self, timeout: float | None = None) -> None:
        self._device.wait(self._queue, self)
        super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._device.wait(self._queue, self)
        return super().exception(timeout)


class DrawnStream(InterpretedStream):
    """The inputs of rows of padding, which have the slot behind the last one, are absurd."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(DrawnDevice(seed).queue())

    def fill(self, target: Tensor, values: NDArray[Any]) -> None:
        rows = values.reshape(4, -1).copy()
        if (padding := rows[0] == SLOTS).any() and not padding.all():
            rows[1:, padding] = [[5], [4], [700]]  # token, length, offset
        super().fill(target, rows.ravel())
