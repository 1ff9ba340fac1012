"""One log line and one span for each choice that this worker runs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.model_worker.batching.steady import Drawn
from antiphon.telemetry.tracing import Span, span

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.model_worker.batching.state import ChoiceKey, Progress
    from antiphon.model_worker.protocol.worker_output import RunChoice

log = logging.getLogger(__name__)

_ID_BYTES = 4


@dataclass(slots=True)
class _LoggedChoice:
    run: RunChoice
    span: Span
    began: float
    first_s: float | None = None
    id_bytes: int = 0


class WorkerRequestLog:
    """Tracks each choice from when it is added to the loop to its end. Times are `Clock.now`."""

    def __init__(self) -> None:
        self._entries: dict[ChoiceKey, _LoggedChoice] = {}

    def begin(self, run: RunChoice, now: float) -> None:
        """Start the span of a choice that is added to the loop."""
        here = span("worker.generate", run.traceparent, request_id=run.state.request_id).start()
        self._entries[run.key] = _LoggedChoice(run, here, now)

    def step(self, progress: Iterable[Progress], now: float) -> int:
        """Count the progress of a step; return its number of output tokens."""
        entries, id_bytes = self._entries, 0
        if isinstance(progress, Drawn):  # no first or last token of a choice is among these
            for key in progress.keys:
                if key in entries:
                    entries[key].id_bytes += _ID_BYTES
            return len(progress)
        for news in progress:
            id_bytes += len(news.token_ids)
            entry = entries.get(news.key)
            if entry is None:
                continue
            entry.id_bytes += len(news.token_ids)
            if entry.first_s is None and news.token_ids:
                entry.first_s = now - entry.began
            if news.finish is not None:
                error = news.finish.error
                self._end(entry, now, error.code if error else news.finish.reason.value)
        return id_bytes // _ID_BYTES

    def drop(self, key: ChoiceKey, now: float) -> None:
        """End a choice that was dropped: a stop string, an abort, a deadline."""
        entry = self._entries.get(key)
        if entry is not None:
            self._end(entry, now, "dropped")

    def _end(self, entry: _LoggedChoice, now: float, reason: str) -> None:
        state = entry.run.state
        del self._entries[entry.run.key]
        tokens = entry.id_bytes // _ID_BYTES
        entry.span.set(output_tokens=tokens, reason=reason)
        entry.span.end()
        log.info(
            "choice ended",
            extra={
                "request_id": state.request_id,
                "choice": state.choice,
                "reason": reason,
                "prompt_tokens": len(state.prompt_ids) // _ID_BYTES,
                "output_tokens": tokens,
                "first_token_s": entry.first_s,
                "seconds": now - entry.began,
            },
        )
