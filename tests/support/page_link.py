"""Links between the ranks of a worker, within one process."""

from __future__ import annotations

from queue import SimpleQueue


class LinkEnded(Exception):
    """The other side has ended."""


class Pipe:
    """A `PageLink`: what is sent in one piece is received in one."""

    def __init__(self) -> None:
        self._pieces = SimpleQueue[bytearray | None]()

    def send(self, data: bytearray | memoryview) -> None:
        self._pieces.put(bytearray(data))  # the sender uses its memory again

    def end(self) -> None:
        self._pieces.put(None)

    def receive(self, out: bytearray | memoryview) -> None:
        piece = self._pieces.get()
        if piece is None:
            raise LinkEnded
        assert len(piece) == len(out), "frames are received as they were sent"
        out[:] = piece
