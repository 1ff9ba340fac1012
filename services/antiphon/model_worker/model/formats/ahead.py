"""Reads what comes next while what came before is put into place."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from antiphon.model_worker.model.formats.stored import Data

READERS = 2
"""A disk or a network is kept busy by few; one that is slow to answer, by more than one."""
AHEAD_BYTES = 16 << 20
"""How much may be read and not yet in place, beside one tensor."""


def read_ahead(tensors: Iterable[Data]) -> Iterator[Tensor]:
    """Yield what tensors hold, in order; each is to be released before the next is taken."""
    waiting: deque[tuple[Data, Future[Tensor]]] = deque()
    ahead_bytes = 0
    readers = ThreadPoolExecutor(READERS, thread_name_prefix="weights")
    try:
        for tensor in tensors:
            waiting.append((tensor, readers.submit(tensor.read)))
            ahead_bytes += tensor.size_bytes
            while ahead_bytes > AHEAD_BYTES and len(waiting) > 1:
                ahead_bytes -= waiting[0][0].size_bytes
                yield waiting.popleft()[1].result()
        while waiting:
            yield waiting.popleft()[1].result()
    finally:
        readers.shutdown(cancel_futures=True)
