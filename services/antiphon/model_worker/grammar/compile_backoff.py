"""Backoff for grammars whose compilation timed out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_worker.grammar.lru_cache import LruCache
from antiphon.wire.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.grammar.source import GrammarSource

PAUSE_S = 30.0
"""Pause before the first retry."""
PAUSE_S_MAX = 3600.0


class CompileBackoff:
    """Remembers timeouts for a while; no grammar is refused for good.

    A pathological grammar that is requested again and again is compiled less and less often.
    """

    def __init__(self, entries_max: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._timeouts: LruCache[GrammarSource, tuple[float, float]] = LruCache(
            entries_max=entries_max, bytes_max=1 << 24, size_bytes=lambda key, _: len(key.text)
        )

    def check(self, source: GrammarSource) -> None:
        """Check whether a grammar may be compiled now.

        Raises:
            Overloaded: It timed out recently.
        """
        until, _ = self._timeouts.get(source) or (0.0, 0.0)
        left_s = until - self._clock()
        if left_s > 0:
            raise Overloaded("grammar: it took too long to compile", retry_after_s=left_s)

    def record_timeout(self, source: GrammarSource, timeout_s: float) -> Overloaded:
        """Record that a grammar timed out; return the error for its requests."""
        _, before_s = self._timeouts.get(source) or (0.0, PAUSE_S / 2)
        pause_s = min(2 * before_s, PAUSE_S_MAX)
        self._timeouts.put(source, (self._clock() + pause_s, pause_s))
        message = f"grammar: it takes longer than {timeout_s:g} s to compile"
        return Overloaded(message, retry_after_s=pause_s)
