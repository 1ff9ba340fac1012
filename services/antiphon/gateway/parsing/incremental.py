"""Runs a reader on text that arrives in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.parsing.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.gateway.parsing.reader import Steps


class IncrementalReader:
    """A reader and its pending text."""

    def __init__(self, read: Callable[[Reader], Steps[None]]) -> None:
        self._reader = Reader()
        self._steps = read(self._reader)
        self._done = False

    @property
    def held(self) -> int:
        """Number of characters held back until later text decides what they are."""
        return self._reader.held

    def feed(self, text: str) -> None:
        """Read the next piece."""
        self._reader.push(text)
        self._run()

    def end(self) -> None:
        """Read the rest: no more text will arrive."""
        self._reader.close()
        self._run()
        assert self._done, "a reader waits for text that will not arrive"
        assert self._reader.ended, "a reader left text unread"

    def _run(self) -> None:
        if not self._done:
            self._done = next(self._steps, self) is self
            self._reader.flush()
