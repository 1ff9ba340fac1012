"""Stop strings, found across the borders of tokens, with no letter of one shown too early."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """A stop string was found. `text` is what may still be shown before the end."""

    stop: str
    text: str


class StopScanner:
    """Holds back text that may be the beginning of a stop string, until it is or is not one."""

    def __init__(self, strings: tuple[str, ...], include: bool) -> None:
        self._strings = strings
        self._include = include
        self._held = ""

    @property
    def holds(self) -> bool:
        """Whether some text is held back."""
        return bool(self._held)

    def push(self, text: str) -> str | Match:
        """Take more text; return what may be shown, or the earliest match.

        Of two strings that begin at the same place, the one named first in the request wins.
        """
        text = self._held + text
        places = ((text.find(stop), order) for order, stop in enumerate(self._strings))
        found = min(
            ((at, order) for at, order in places if at >= 0),
            default=None,
        )
        if found is not None:
            at, order = found
            stop = self._strings[order]
            self._held = ""
            return Match(stop, text[: at + len(stop)] if self._include else text[:at])
        held = max((_overlap(text, stop) for stop in self._strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return what was held back: the choice has ended and nothing can complete it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
