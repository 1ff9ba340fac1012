"""Pages in the memory of a device, copied to bytes of the host and back beside its steps.

Axes: L layers of the group, N pages that are copied, B bytes of a page in one layer.
"""

from __future__ import annotations

from contextlib import ExitStack
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.kernels.ops import Ops
    from antiphon.kernels.stream import Stream
    from antiphon.kernels.upload import Upload
    from antiphon.model_worker.runner.pools import GroupMemory


class PageStream:
    """A stream for copies alone; threads take turns to launch on it, and wait without it.

    Steps and copies are not ordered by the device: a copy begins once the host knows of the step
    that has written its pages, and the host has waited for it before a step reads them.
    """

    def __init__(self, stream: Stream, ops: Ops, upload: Upload) -> None:
        self.stream = stream
        self.ops = ops
        self.upload = upload
        self.turn = Lock()


class DevicePages:
    """The pages of one cache group: the bytes are those of `GroupMemory`, which has them."""

    def __init__(self, memory: GroupMemory, copies: PageStream) -> None:
        self._memory = memory
        self._copies = copies

    def compile(self) -> None:
        """Compile the kernels, by a copy of a page to itself: no step may write it meanwhile."""
        page = memoryview(bytearray(self._memory.group.page_bytes))
        self.read([0], page)
        self.write([0], page)

    def read(self, pages: Sequence[int], out: memoryview) -> None:
        """Copy pages to bytes: of each tensor, those of each layer, in the order given."""
        copies, numbers = self._copies, np.asarray(pages, np.int32)
        with copies.turn, torch.inference_mode(), copies.stream.launching():
            at = copies.upload(numbers)
            gathered = [copies.ops.gather_pages(pool, at) for pool in self._memory.tensors]
            download = copies.stream.download(gathered)
        into = self._memory.packed(len(pages), out)
        for packed, copied in zip(into, download.wait(), strict=True):
            packed[:] = copied

    def write(self, pages: Sequence[int], data: memoryview) -> None:
        """Copy what `read` has copied of so many pages to these; a hole leaves a page out."""
        copies, numbers = self._copies, np.asarray(pages, np.int32)
        parts, stream = self._memory.packed(len(pages), data), copies.stream
        with ExitStack() as after, copies.turn, torch.inference_mode(), stream.launching():
            try:
                at = copies.upload(numbers)
                for pool, packed in zip(self._memory.tensors, parts, strict=True):
                    copies.ops.scatter_pages(pool, at, copies.upload(packed))
            finally:
                # After a failure, too: from here on these pages may be another request's.
                after.callback(stream.download([]).wait)
