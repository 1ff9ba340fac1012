"""Rows whose tokens are sampled, but not accepted yet by their grammar matchers."""

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
    """A row that waits for its grammar matcher, and its outcome.

    Attributes:
        row: The row.
        accepted: Its sampled tokens.
        outputs: Their logprobs and hidden states, or the pooled vector.
        task: The matcher task that accepts them.
        since: When the wait for it was first noticed.
    """

    row: BatchRow
    accepted: list[int]
    outputs: LogprobsReader | PooledVector | None
    task: MatcherTask
    since: float | None = None


class PendingGrammarRows:
    """The rows that wait for their grammar matchers; other requests do not wait for them.

    A row that waits too long ends as overloaded, not as invalid: the time depends on the load of
    the machine.
    """

    def __init__(self, executor: MatcherExecutor, timeout_s: float) -> None:
        self._executor = executor
        self._timeout_s = timeout_s
        self._rows: list[PendingGrammarRow] = []

    def __len__(self) -> int:
        return len(self._rows)

    def submit(self, tasks: Sequence[MatcherTask]) -> None:
        """Start matcher tasks, and wait a moment for them."""
        self._executor.submit(tasks)

    def wait(self) -> None:
        """Wait a moment for matcher tasks, when there is nothing else to do."""
        self._executor.wait()

    def put(self, late: PendingGrammarRow) -> None:
        """Add a row whose matcher task is not done."""
        late.row.request.late = True
        self._rows.append(late)

    def take_done(self) -> Iterator[PendingGrammarRow]:
        """The rows whose matcher tasks are done, each once. Ended requests are forgotten."""
        rows, self._rows = self._rows, []
        for late in rows:
            request = late.row.request
            if request.phase is Phase.ENDED:
                self._executor.cancel(late.task)
            elif late.task.done:
                request.late = False
                yield late
            else:
                self._rows.append(late)

    @property
    def next_due(self) -> float | None:
        """When the next row has waited too long; None if `overdue` has seen none yet."""
        since = (late.since for late in self._rows if late.since is not None)
        first = min(since, default=None)
        return None if first is None else first + self._timeout_s

    def overdue(self, now: float) -> Iterator[tuple[Request, Overloaded]]:
        """Requests whose rows have waited too long, with the error."""
        for late in self._rows:
            late.since = now if late.since is None else late.since
            if now - late.since > self._timeout_s:
                message = f"grammar: matching a token takes longer than {self._timeout_s:g} s"
                yield late.row.request, Overloaded(message, retry_after_s=_RETRY_AFTER_S)
