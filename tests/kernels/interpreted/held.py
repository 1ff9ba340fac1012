"""A stream that computes nothing until it is waited for: the slowest device there can be.

Rows that pad a step are poisoned on it.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from antiphon.kernels.stream import InterpretedStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

SLOTS = 64


class Held(Executor):
    """Makes each call when its result, or that of a later one, is asked for."""

    def __init__(self) -> None:
        self._calls: deque[tuple[HeldFuture, Callable[..., Any]]] = deque()
        self.made = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> HeldFuture:
        assert not args
        assert not kwargs
        future = HeldFuture(self)
        self._calls.append((future, fn))
        return future

    def make_until(self, last: HeldFuture) -> None:
        while not last.done():
            future, call = self._calls.popleft()
            self.made += 1
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001  # raised where it is waited for
                future.set_exception(error)


class HeldFuture(Future[Any]):
    def __init__(self, held: Held) -> None:
        super().__init__()
        self._held = held

    def result(self, timeout: float | None = None) -> Any:
        self._held.make_until(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._held.make_until(self)
        return super().exception(timeout)


class HeldStream(InterpretedStream):
    """The inputs of rows of padding, which have the slot behind the last one, are absurd."""

    def __init__(self) -> None:
        super().__init__(Held())
        self.padded = 0  # steps

    def fill(self, target: Tensor, values: NDArray[Any]) -> None:
        rows = values.reshape(4, -1).copy()
        if (padding := rows[0] == SLOTS).any() and not padding.all():
            self.padded += 1
            rows[1:, padding] = [[5], [4], [700]]  # token, length, offset
        super().fill(target, rows.ravel())
