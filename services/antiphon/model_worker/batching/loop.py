"""The batching loop: a thread that plans, runs and commits, one step after the other."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.model_worker.batching.builder import build_plan
from antiphon.wire.errors import Internal

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.batching.batching import Batching
    from antiphon.model_worker.batching.builder import Row
    from antiphon.model_worker.batching.mailbox import Mail, Mailbox
    from antiphon.model_worker.batching.request import Progress
    from antiphon.model_worker.batching.runner import Runner

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 1e-4
"""How long a thread may keep the interpreter from the other one. Python's default, 5 ms, is longer
than a step of a small model: the bus side would run in the gaps only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one turn of the loop did, and how things stand after it.

    Attributes:
        step: Plans run since start.
        seconds: Of the plan; 0 in a turn that ran none.
        tokens: Tokens in the plan.
        rows: Choices in the plan.
        pages_free: In the group that has the fewest left.
        retractions: Since start.
        pages_flushed: Pages that a flush gave back, in the turn that did it.
    """

    step: int
    seconds: float = 0.0
    tokens: int = 0
    rows: int = 0
    progress: tuple[Progress, ...]
    pages_free: int
    running: int
    waiting: int
    retractions: int
    pages_flushed: int | None = None


class BatchingLoop:
    """Turns mail into steps and steps into reports, until the mailbox is closed.

    `deliver` gets every report, in order, in the loop's thread. A plan that cannot be run ends its
    requests; a bug in the loop itself leaves `run` as what it is, and ends the process.
    """

    def __init__(
        self,
        batching: Batching,
        runner: Runner,
        mailbox: Mailbox,
        deliver: Callable[[StepReport], None],
    ) -> None:
        self._batching = batching
        self._runner = runner
        self._mailbox = mailbox
        self._deliver = deliver
        self._step = 0

    def run(self) -> None:
        """Go on until the mailbox is closed. The body of the loop's thread."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        while (mail := self._mailbox.take(wait=self._batching.idle)) is not None:
            self._deliver(self.turn(mail))

    def turn(self, mail: Mail) -> StepReport:
        """Apply mail, then run one step if there is something to run."""
        batching = self._batching
        for key, state in mail.runs:
            batching.add(key, state)
        for key in mail.drops:
            batching.drop(key)
        pages_flushed = batching.flush() if mail.flush else None
        rows = batching.next_rows()
        started = time.perf_counter()
        if rows:
            self._step += 1
            self._run_rows(rows)
        return StepReport(
            step=self._step,
            seconds=time.perf_counter() - started if rows else 0.0,
            tokens=sum(row.length for row in rows),
            rows=len(rows),
            progress=batching.take_progress(),
            pages_free=min(batching.pools.free()),
            running=len(batching.running),
            waiting=len(batching.waiting),
            retractions=batching.retractions,
            pages_flushed=pages_flushed,
        )

    def _run_rows(self, rows: list[Row]) -> None:
        pools = self._batching.pools
        plan = build_plan(self._step, rows, groups=len(pools.groups))
        pools.launched(plan.step)
        try:
            outcome = self._runner.run(plan)
        except Exception:
            # One of the process's outermost borders: whatever a kernel raises ends these requests,
            # with the traceback here, and not the service.
            log.exception("plan failed", extra={"step": plan.step, "rows": len(rows)})
            pools.finished(plan.step)
            self._batching.fail(rows, Internal("the step of this request failed"))
        else:
            assert outcome.step == plan.step, "the outcome is another plan's"
            pools.finished(plan.step)
            self._batching.commit(rows, outcome)
