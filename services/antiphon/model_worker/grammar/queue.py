"""The queue of requests that wait for their grammars."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from antiphon.wire.errors import EngineError, Internal

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from antiphon.model_worker.batching.request import ChoiceKey
    from antiphon.model_worker.grammar.backend import GrammarBackend
    from antiphon.model_worker.grammar.matcher import GrammarMatcher
    from antiphon.model_worker.grammar.metrics import GrammarMetrics
    from antiphon.model_worker.protocol.worker_output import RunChoice

log = logging.getLogger(__name__)


class GrammarQueue:
    """Holds each sequence until its own grammar is ready, independently of the others.

    It has no bound of its own: the worker bounds the number of admitted requests.
    """

    def __init__(
        self,
        grammars: GrammarBackend,
        group: asyncio.TaskGroup,
        metrics: GrammarMetrics,
        *,
        hand_over: Callable[[RunChoice, GrammarMatcher], None],
        refuse: Callable[[ChoiceKey, EngineError], None],
    ) -> None:
        """Create an empty queue.

        Args:
            grammars: Makes the matchers.
            group: Runs a task for each waiting request.
            metrics: Counts requests that get no matcher.
            hand_over: Receives a request with its matcher, while it still counts as waiting.
            refuse: Receives the key of a request without a matcher, and the reason.
        """
        self._grammars = grammars
        self._group = group
        self._metrics = metrics
        self._hand_over = hand_over
        self._refuse = refuse
        self._waiting: dict[ChoiceKey, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, run: RunChoice) -> None:
        """Add a request: later it is passed to `hand_over` with its matcher, or to `refuse`."""
        self._waiting[run.key] = self._group.create_task(self._wait(run), name="grammar")

    def drop(self, key: ChoiceKey) -> bool:
        """Remove a request; whether it was here."""
        task = self._waiting.pop(key, None)
        if task is None or not task.cancel():
            return False
        self._metrics.aborted.inc()
        return True

    async def _wait(self, run: RunChoice) -> None:
        try:
            matcher = await self._grammars.matcher(run.state)
        except EngineError as error:
            self._metrics.aborted.inc()
            self._refuse(run.key, error)
        except Exception:
            # A last-resort boundary: whatever a client's grammar makes the code raise fails its own
            # request, not the service.
            log.exception("grammar not read", extra={"request_id": run.state.request_id})
            self._metrics.aborted.inc()
            self._refuse(run.key, Internal("the grammar of this request could not be read"))
        else:
            self._hand_over(run, matcher)
        del self._waiting[run.key]
