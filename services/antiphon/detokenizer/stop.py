"""Stop strings and patterns, matched across token borders, without emitting text too early."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.text.stop_patterns import StopPatternMatcher, compile_pattern


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop was found. `text` is the text to emit before the end."""

    stop: str
    text: str


class StopScanner:
    """Holds back text that may be the beginning of a stop, until that is decided."""

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
        """Add text; return the text that may be emitted, or the earliest match.

        Of two stops that begin at the same position, the one named first in the request wins, and a
        string before a pattern.
        """
        if not self._strings and not self._patterns:
            return text
        matches = self._matches(text)
        text = self._held + text
        matches = [*self._found(text), *matches]
        if matches:
            start, end, stop = min(matches, key=lambda match: match[0])
            self._held = ""
            return StopMatch(stop, text[: end if self._include else start])
        held = max((partial_match_length(text, stop) for stop in self._strings), default=0)
        end_at = self._held_at + len(text)
        partial = (end_at - matcher.held_from for _, matcher in self._patterns)
        held = max(held, *partial, 0)
        self._held = text[len(text) - held :]
        self._held_at = end_at - held
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return the held-back text: the choice has ended, so no stop can be completed."""
        held, self._held = self._held, ""
        return held

    def _found(self, text: str) -> list[tuple[int, int, str]]:
        """The first occurrence of each string, as (start, end, string)."""
        starts = ((text.find(stop), stop) for stop in self._strings)
        return [(at, at + len(stop), stop) for at, stop in starts if at >= 0]

    def _matches(self, text: str) -> list[tuple[int, int, str]]:
        """Each matched pattern as (start, end, pattern), relative to the held-back text."""
        matches = ((matcher.feed(text), pattern) for pattern, matcher in self._patterns)
        return [
            (match[0] - self._held_at, match[1] - self._held_at, pattern)
            for match, pattern in matches
            if match is not None
        ]


def partial_match_length(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
