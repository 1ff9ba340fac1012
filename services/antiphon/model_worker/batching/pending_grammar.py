"""Rows whose tokens are drawn, and whose guides are still on the way over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.model_worker.batching.request import Phase
from antiphon.wire.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.model_worker.batching.builder import BatchRow
    from antiphon.model_worker.batching.logprobs import LogprobsReader
    from antiphon.model_worker.batching.pooling import PooledVector
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.grammar.executor import MatcherExecutor, MatcherTask

_RETRY_AFTER_S = 5.0


@dataclass(slots=True)
class PendingGrammarRow:
    """What a row will be committed with.

    Attributes:
        accepted: The tokens that it has drawn.
        told: What is told of them, or what the prompt became.
        walk: Of its guide.
        since: When it was first waited for.
    """

    row: BatchRow
    accepted: list[int]
    outputs: LogprobsReader | PooledVector | None
    task: MatcherTask
    since: float | None = None


class PendingGrammarRows:
    """They wait, and their requests with them; nobody else does.

    Whoever waits too long ends as an overload: the time is the machine's, and no part of what a
    grammar means.
    """

    def __init__(self, executor: MatcherExecutor, timeout_s: float) -> None:
        self._walker = executor
        self._timeout_s = timeout_s
        self._rows: list[PendingGrammarRow] = []

    def __len__(self) -> int:
        return len(self._rows)

    def submit(self, tasks: Sequence[MatcherTask]) -> None:
        """Begin walks, and wait a moment for them."""
        self._walker.submit(tasks)

    def wait(self) -> None:
        """Wait a moment, for there is nothing else to do."""
        self._walker.wait()

    def put(self, late: PendingGrammarRow) -> None:
        """A row whose walk is not done."""
        late.row.request.late = True
        self._rows.append(late)

    def take_done(self) -> Iterator[PendingGrammarRow]:
        """Those that have arrived, each once. Requests that have ended are forgotten."""
        rows, self._rows = self._rows, []
        for late in rows:
            request = late.row.request
            if request.phase is Phase.ENDED:
                self._walker.cancel(late.task)
            elif late.task.done:
                request.late = False
                yield late
            else:
                self._rows.append(late)

    @property
    def next_due(self) -> float | None:
        """When one of them has waited for too long, as far as anybody has looked."""
        since = (late.since for late in self._rows if late.since is not None)
        first = min(since, default=None)
        return None if first is None else first + self._timeout_s

    def overdue(self, now: float) -> Iterator[tuple[Request, Overloaded]]:
        """Those that have waited for too long, with the reason."""
        for late in self._rows:
            late.since = now if late.since is None else late.since
            if now - late.since > self._timeout_s:
                message = f"grammar: a token takes longer than {self._timeout_s:g} s to follow"
                yield late.row.request, Overloaded(message, retry_after_s=_RETRY_AFTER_S)
