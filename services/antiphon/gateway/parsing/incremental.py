"""Runs a reader of answers, a piece of text at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.parsing.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.gateway.parsing.reader import Steps


class IncrementalReader:
    """A reader and the text that it waits for."""

    def __init__(self, read: Callable[[Reader], Steps[None]]) -> None:
        self._reader = Reader()
        self._steps = read(self._reader)
        self._done = False

    @property
    def held(self) -> int:
        """Characters that wait for what decides what they are."""
        return self._reader.held

    def feed(self, text: str) -> None:
        """Let it read the next piece."""
        self._reader.push(text)
        self._run()

    def end(self) -> None:
        """Let it read what is left: no more will come."""
        self._reader.close()
        self._run()
        assert self._done, "a reader waits for text that will not come"
        assert self._reader.ended, "a reader leaves text unread"

    def _run(self) -> None:
        if not self._done:
            self._done = next(self._steps, self) is self
            self._reader.flush()
