"""Lets faults happen to a whole stack under load, and compares every answer with a run without.

    python -m tests.faults.matrix  # every fault; writes docs/reliability.md
    python -m tests.faults.matrix --each-kind-once --clients 20

The stack has two schedulers, workers, tokenizers and detokenizers, and a broker of its own, to
which all connect through a link that can lose messages. Clients stream requests of all kinds, one
after the other. A fault happens when each reads its first words; the load ends when each has read a
whole answer that it asked for after the fault. After a fault that the stack does not recover from
there is a new one.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from tests.faults.faults import EACH_KIND, LONGER
from tests.faults.site import MEMBERS, Fault, Site
from tests.faults.streams import Answer, Load, ask_all
from tests.support.nats import NatsServer
from tests.support.nats_link import linked
from tests.support.wait import until
from tests.system.stack import heartbeats, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

WORKERS = tuple(f"worker-{number}" for number in range(MEMBERS))
ARGUMENTS = (
    "--enable-deterministic-inference",
    *("--dp-size", str(MEMBERS)),
    *("--tokenizer-worker-num", str(MEMBERS)),
    *("--detokenizer-worker-num", str(MEMBERS)),
    *("--supervisor-schedulers", str(MEMBERS)),
)
PAGE = Path("docs/reliability.md")
CLIENTS = 64
TOKENS = 256
"""Of each answer at most."""
QUIET_S = 2.0
"""Between the first words of all streams and the fault."""
AFTER_S = 5.0
"""After a fault streams that it has not hit may be slow: those that it has hit begin again."""
TIMEOUT_S = 240.0
"""For each stage: first words, recovery, pages without owner. A loaded machine is slow."""
AT_ONCE = 64
"""Requests of a run without a fault."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a fault did to requests that were open or came while it lasted.

    Attributes:
        times: How many processes or messages it has hit.
        open: Streams that were open when it happened.
        complete: All answers that were read, and what they should say.
        refused: Requests that were refused before they were taken, and asked again.
        lost: Numbers and errors of requests without an answer.
        wrong: Numbers of answers that differ.
        ended: Of a fault of their gateway, streams that ended as a right beginning.
        pauses_s: The longest pause of each open stream whose worker, detokenizer or gateway the
            fault has hit.
        others_s: The times between pieces of all others, from the fault to `AFTER_S` after it.
        quiet_s: Those of all before.
        first_s: How long each request that came from the fault on, or whose first words it hit,
            waited for these.
    """

    fault: Fault
    times: int
    open: int
    complete: int
    refused: int
    lost: Sequence[tuple[int, str]]
    wrong: Sequence[int]
    ended: int
    pauses_s: Sequence[float]
    others_s: Sequence[float]
    quiet_s: Sequence[float]
    first_s: Sequence[float]

    @property
    def is_well(self) -> bool:
        return bool(self.times and self.open) and not (self.lost or self.wrong)

    def __str__(self) -> str:
        return (
            f"{self.fault.name}: {self.times} times, {self.open} open, {self.complete} complete, "
            f"{self.refused} refused, lost {self.lost}, wrong {self.wrong}, {self.ended} ended, "
            f"{len(self.pauses_s)} hit: pause {_p99(self.pauses_s)} s; "
            f"others {_p99(self.others_s)} s, before {_p99(self.quiet_s)} s; "
            f"first words {max(self.first_s, default=0.0):.1f} s"
        )


def _p99(times_s: Sequence[float]) -> str:
    return f"{np.quantile(times_s, 0.99):.2f}" if times_s else ""


@dataclass
class FaultBed:
    site: Site
    clients: int
    tokens: int = TOKENS
    quiet_s: float = QUIET_S
    wanted: dict[int, Answer] = field(default_factory=dict[int, Answer])
    """What requests say without a fault, by number."""

    async def suffer(self, fault: Fault) -> Outcome:
        """Let a fault happen under load.

        Raises:
            TimeoutError: The stack does not recover, or keeps pages.
        """
        stack = self.site.stack
        await until(stack.healthy, TIMEOUT_S)
        async with Load(stack, self.clients, self.tokens) as load:
            await until(lambda: all(_has_begun(a) for a in load.answers), TIMEOUT_S)
            quiet_s = time.monotonic()
            await asyncio.sleep(self.quiet_s)
            await until(lambda: 4 * len(_open(load)) >= 3 * self.clients, TIMEOUT_S)
            self.site.struck = None
            began_s = time.monotonic()
            opened = _open(load)
            placed = [self.site.placements.of(answer.request_id) for answer in opened]
            times = await fault.happen(self.site)
            ended_s = time.monotonic()

            def recovered(answers: list[Answer]) -> bool:
                return any(a.usage and not a.error for a in answers if a.began_s > ended_s)

            try:
                await until(lambda: all(map(recovered, load.answers)), TIMEOUT_S)
            except TimeoutError:
                still = [answers[-1] for answers in load.answers if not recovered(answers)]
                raise TimeoutError(f"no whole answer after the fault: {still}") from None
        answers = [answer for answers in load.answers for answer in answers]
        await self._learn(answers)
        await self._pages_free()
        complete = [answer for answer in answers if answer.error is None]
        failed = [answer for answer in answers if answer.error is not None]
        ended = [a for a in failed if fault.owner and a.is_beginning_of(self.wanted[a.number])]
        lost = [(a.number, str(a.error)) for a in failed if a not in ended]
        hit = [
            answer
            for answer, instances in zip(opened, placed, strict=True)
            if self.site.hits(instances)
        ]
        return Outcome(
            fault=fault,
            times=times,
            open=len(opened),
            complete=len(complete),
            refused=load.refused,
            lost=lost,
            wrong=[a.number for a in complete if a.content != self.wanted[a.number].content],
            ended=len(ended),
            pauses_s=[max(a.gaps_s(began_s, ended_s), default=0.0) for a in hit],
            others_s=[
                gap_s
                for answer in opened
                if answer not in hit
                for gap_s in answer.gaps_s(began_s, ended_s + AFTER_S)
            ],
            quiet_s=[
                gap_s for answer in opened for gap_s in answer.gaps_within_s(quiet_s, began_s)
            ],
            first_s=[a.first_s for a in answers if a.began_s + a.first_s >= began_s],
        )

    async def _learn(self, answers: Iterable[Answer]) -> None:
        """Ask again, without a fault, what has not been asked so before."""
        numbers = sorted({answer.number for answer in answers} - self.wanted.keys())
        wanted = await ask_all(self.site.stack, numbers, AT_ONCE, self.tokens)
        failed = {number: a.error for number, a in wanted.items() if a.error is not None}
        assert not failed, f"requests fail without a fault: {failed}"
        self.wanted |= wanted

    async def _pages_free(self) -> None:
        await heartbeats(
            self.site.stack.nats_url,
            lambda beats: all(
                worker in beats
                and (load := beats[worker].worker) is not None
                and load.pages_free == load.pages_total
                for worker in WORKERS
            ),
            TIMEOUT_S,
        )


def _has_begun(answers: Sequence[Answer]) -> bool:
    return any(answer.arrivals_s for answer in answers)


def _open(load: Load) -> list[Answer]:
    return [answers[-1] for answers in load.answers if answers and answers[-1].is_open]


@asynccontextmanager
async def fault_bed(
    clients: int, tokens: int = TOKENS, quiet_s: float = QUIET_S
) -> AsyncIterator[FaultBed]:
    """A stack with a broker of its own."""
    async with NatsServer(durable=True) as broker, linked(broker.url) as link:
        running = serving("--bus-url", link.url, *ARGUMENTS)
        stack = await asyncio.to_thread(running.__enter__)
        try:
            yield FaultBed(Site(stack, broker, link), clients, tokens, quiet_s)
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)


def page(
    outcomes: Sequence[Outcome],
    failed: Sequence[str],
    left: Sequence[str],
    commit: str,
    clients: int,
) -> str:
    """docs/reliability.md."""
    lines = [
        "# Reliability",
        "",
        "What faults of real processes do to requests: `make test-faults` writes this page.",
        f"Measured at commit {commit} with {clients} clients, which stream one request after",
        "the other: greedy, sampled, under a pattern, with two choices, and with tools; with",
        "prompts of about 128 and 1,500 tokens. Two schedulers, tokenizers, detokenizers and",
        "workers of the embedded model in deterministic mode, one broker, all on one machine.",
        "Every answer is compared with that of the same request without a fault.",
        "",
        "*times*: processes or messages that were hit. *refused*: requests that got a 503 with",
        "`Retry-After` before they were taken, and were asked again. *lost*: others without an",
        "answer.",
        "*wrong*: answers that differ in any byte, finish reason or token count. *ended*: streams",
        "of a gateway that was hit itself, each a beginning of the right answer. *hit*: open",
        "streams whose worker, detokenizer or gateway was hit; all, if messages or the broker",
        "were. *pause*: the longest time without a piece of each of these, median and p99, in",
        "seconds. *others*: p99 of the times between pieces of all other open streams, until",
        f"{AFTER_S:g} s after the fault; *before*: of all open streams before it. *first words*:",
        "the longest time that a request waited for these, from the fault on.",
        "",
        "| fault | times | open | complete | refused | lost | wrong | ended "
        "| hit | pause | others | before | first words |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        pause = f"{median(one.pauses_s):.1f} / {_p99(one.pauses_s)}" if one.pauses_s else ""
        lines.append(
            f"| {one.fault.name} | {one.times} | {one.open} | {one.complete} | {one.refused} | "
            f"{len(one.lost)} | {len(one.wrong)} | {one.ended} | {len(one.pauses_s)} | {pause} | "
            f"{_p99(one.others_s)} | {_p99(one.quiet_s)} | {max(one.first_s, default=0.0):.1f} |"
        )
    lines += [f"| {name} | | | no recovery | | | | | | | | | |" for name in failed]
    if left:
        lines += ["", f"The time was over before these: {', '.join(left)}."]
    return "\n".join([*lines, ""])


def commit_here() -> str:
    described = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()


async def main(faults: Sequence[Fault], clients: int, minutes: float) -> bool:
    """Let each fault happen, and write the page as they go; return whether all is well."""
    waiting, outcomes, failed = list(reversed(faults)), list[Outcome](), list[str]()
    until_s = time.monotonic() + 60 * minutes

    def write() -> None:
        left = [fault.name for fault in reversed(waiting)]
        PAGE.write_text(page(outcomes, failed, left, commit, clients))

    commit = commit_here()
    while waiting and time.monotonic() < until_s:
        before = len(waiting)
        try:
            async with fault_bed(clients) as bed:
                while waiting and time.monotonic() < until_s:
                    outcomes.append(await bed.suffer(waiting.pop()))
                    print(outcomes[-1], flush=True)
                    write()
        except (TimeoutError, AssertionError) as error:
            if len(waiting) == before:  # the stack has not started
                raise
            failed.append(faults[-len(waiting) - 1].name)
            print(f"{failed[-1]}: no recovery: {error!r}", flush=True)
    write()
    return not (failed or waiting) and all(outcome.is_well for outcome in outcomes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--each-kind-once", action="store_true", help="for 3 s at most")
    parser.add_argument("--only", default="", help="faults with this in their names")
    parser.add_argument("--minutes", type=float, default=60.0, help="no fault begins after this")
    given = parser.parse_args()
    every = EACH_KIND if given.each_kind_once else (*EACH_KIND, *LONGER)
    chosen = [fault for fault in every if given.only in fault.name]
    sys.exit(not asyncio.run(main(chosen, given.clients, given.minutes)))
