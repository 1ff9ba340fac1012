"""Reads the next tensors while earlier ones are being copied."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from antiphon.model_worker.model.formats.stored_tensor import TensorData

READERS = 2
"""Few readers keep a disk or a network busy; one alone does not where latency is high."""
AHEAD_BYTES = 16 << 20
"""Bytes that may be read but not yet copied, in addition to one tensor."""
ASKED_BYTES = 64 << 20
"""Bytes of read-ahead beyond what is copied, in addition to one tensor. They are in the kernel's
page cache, which no process is charged for.

Read-ahead issues many requests at once; blocking reads, as many as there are readers. Measured
beside other work, with readers alone and with read-ahead: 2.3 and 1.2 s, 2.5 and 1.8 s for 730 MB
of packed weights.
"""


def prefetch_tensors(tensors: Sequence[TensorData]) -> Iterator[Tensor]:
    """Yield the contents of tensors, in order; release each before taking the next."""
    waiting: deque[tuple[TensorData, Future[Tensor]]] = deque()
    ahead_bytes = placed_bytes = 0
    readers = ThreadPoolExecutor(READERS, thread_name_prefix="weights")
    asking = _Prefetcher(tensors)
    try:
        for tensor in tensors:
            asking.until(placed_bytes + ASKED_BYTES)
            waiting.append((tensor, readers.submit(tensor.read)))
            ahead_bytes += tensor.size_bytes
            while ahead_bytes > AHEAD_BYTES and len(waiting) > 1:
                ahead_bytes -= waiting[0][0].size_bytes
                placed_bytes += waiting[0][0].size_bytes
                yield waiting.popleft()[1].result()
        while waiting:
            yield waiting.popleft()[1].result()
    finally:
        asking.end()
        readers.shutdown(cancel_futures=True)


class _Prefetcher:
    """Requests read-ahead of tensors in order, on a thread: a busy disk blocks the caller."""

    def __init__(self, tensors: Sequence[TensorData]) -> None:
        self._left = deque(tensors)
        self._asked_bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights-asked")

    def until(self, size_bytes: int) -> None:
        """Request what begins within the first `size_bytes` of all tensors."""
        while self._left and self._asked_bytes < size_bytes:
            tensor = self._left.popleft()
            self._asked_bytes += tensor.size_bytes
            self._thread.submit(tensor.prefetch)

    def end(self) -> None:
        """Request no more."""
        self._thread.shutdown(cancel_futures=True)
