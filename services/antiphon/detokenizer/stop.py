"""Stop strings and patterns, found across the borders of tokens, with no letter shown too early."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.text.stop_patterns import StopPatternMatcher, compile_pattern


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop was found. `text` is what may still be shown before the end."""

    stop: str
    text: str


class StopScanner:
    """Holds back text that may be the beginning of a stop, until it is or is not one."""

    def __init__(
        self, strings: tuple[str, ...], include: bool, patterns: tuple[str, ...] = ()
    ) -> None:
        self._strings = strings
        self._patterns = tuple(
            (pattern, StopPatternMatcher(compile_pattern(pattern))) for pattern in patterns
        )
        self._include = include
        self._held = ""
        self._held_at = 0  # where it begins in the whole text

    @property
    def has_pending(self) -> bool:
        """Whether some text is held back."""
        return bool(self._held)

    def push(self, text: str) -> str | StopMatch:
        """Take more text; return what may be shown, or the earliest match.

        Of two stops that begin at the same place, the one named first in the request wins, and a
        string before a pattern.
        """
        if not self._strings and not self._patterns:
            return text
        places = self._matches(text)
        text = self._held + text
        places = [*self._found(text), *places]
        if places:
            start, end, stop = min(places, key=lambda place: place[0])
            self._held = ""
            return StopMatch(stop, text[: end if self._include else start])
        held = max((partial_match_length(text, stop) for stop in self._strings), default=0)
        end_at = self._held_at + len(text)
        begun = (end_at - follower.held_from for _, follower in self._patterns)
        held = max(held, *begun, 0)
        self._held = text[len(text) - held :]
        self._held_at = end_at - held
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return what was held back: the choice has ended and nothing can complete it."""
        held, self._held = self._held, ""
        return held

    def _found(self, text: str) -> list[tuple[int, int, str]]:
        """The first place of each string, as (start, end, string)."""
        places = ((text.find(stop), stop) for stop in self._strings)
        return [(at, at + len(stop), stop) for at, stop in places if at >= 0]

    def _matches(self, text: str) -> list[tuple[int, int, str]]:
        """Each pattern that has come true, as (start, end, pattern) in what is held and `text`."""
        matches = ((follower.feed(text), pattern) for pattern, follower in self._patterns)
        return [
            (place[0] - self._held_at, place[1] - self._held_at, pattern)
            for place, pattern in matches
            if place is not None
        ]


def partial_match_length(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
