"""Choices that wait for their grammars."""

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
    """Holds each choice until its own grammar is there; nobody waits for another's.

    Its bound is that of all choices which the worker has taken in.
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
        """Nobody waits yet.

        Args:
            grammars: Where the guides come from.
            group: Where choices wait.
            metrics: Count choices that get no guide.
            hand_over: Gets a choice with its guide, while it still counts as waiting.
            refuse: Gets one that has no guide, with the reason.
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
        """Take a choice in: later it is handed over with its guide, or refused."""
        self._waiting[run.key] = self._group.create_task(self._wait(run), name="grammar")

    def drop(self, key: ChoiceKey) -> bool:
        """Forget a choice; whether it was here."""
        task = self._waiting.pop(key, None)
        if task is None or not task.cancel():
            return False
        self._metrics.aborted.inc()
        return True

    async def _wait(self, run: RunChoice) -> None:
        try:
            guide = await self._grammars.matcher(run.state)
        except EngineError as error:
            self._metrics.aborted.inc()
            self._refuse(run.key, error)
        except Exception:
            # One of the process's outermost borders: whatever a foreign text does to those who
            # read it ends its own request, and not the service.
            log.exception("grammar not read", extra={"request_id": run.state.request_id})
            self._metrics.aborted.inc()
            self._refuse(run.key, Internal("the grammar of this request could not be read"))
        else:
            self._hand_over(run, guide)
        del self._waiting[run.key]
