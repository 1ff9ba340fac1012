"""Lets faults happen to a whole stack under load, and compares every answer with a run without.

    python -m tests.faults.matrix  # every fault; writes docs/reliability.md
    python -m tests.faults.matrix --each-kind-once --clients 20

The stack has two schedulers, workers, tokenizers and detokenizers, and a broker of its own. Clients
stream requests of all kinds, one after the other. A fault happens when each reads its first words;
the load ends when each has read a whole answer that it asked for after the fault.
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
from tests.faults.faults import EACH_KIND, LONGER, MEMBERS, Fault
from tests.faults.streams import Answer, Load, ask_all
from tests.support.nats import NatsServer
from tests.support.wait import until
from tests.system.stack import Stack, heartbeats, serving

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
QUIET_S = 2.0
"""Between the first words of all streams and the fault."""
TIMEOUT_S = 90.0
"""For each stage: first words, recovery, pages without owner."""
AT_ONCE = 16
"""Requests of a run without a fault."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a fault did to requests that were open or came while it lasted.

    Attributes:
        hit: Streams that were open when it happened.
        complete: All answers that were read, and what they should say.
        lost: Numbers and errors of requests without an answer.
        wrong: Numbers of answers that differ.
        ended: Of a fault of their gateway, streams that ended as a right beginning.
        pauses_s: The longest pause of each stream that was hit.
        quiet_s: The longest pause of each before.
    """

    fault: Fault
    hit: int
    complete: int
    lost: Sequence[tuple[int, str]]
    wrong: Sequence[int]
    ended: int
    pauses_s: Sequence[float]
    quiet_s: Sequence[float]


@dataclass
class FaultBed:
    stack: Stack
    broker: NatsServer
    clients: int
    wanted: dict[int, Answer] = field(default_factory=dict[int, Answer])
    """What requests say without a fault, by number."""

    async def suffer(self, fault: Fault) -> Outcome:
        """Let a fault happen under load.

        Raises:
            TimeoutError: The stack does not recover, or keeps pages.
        """
        await until(self.stack.healthy, TIMEOUT_S)
        async with Load(self.stack, self.clients) as load:
            await until(lambda: all(a and a[-1].arrivals_s for a in load.answers), TIMEOUT_S)
            quiet_s = time.monotonic()
            await asyncio.sleep(QUIET_S)
            began_s = time.monotonic()
            hit = [answers[-1] for answers in load.answers]
            await fault.happen(self.stack, self.broker)
            ended_s = time.monotonic()

            def recovered(answers: list[Answer]) -> bool:
                return any(a.usage and not a.error for a in answers if a.began_s > ended_s)

            await until(lambda: all(map(recovered, load.answers)), TIMEOUT_S)
        answers = [answer for answers in load.answers for answer in answers]
        await self._learn(answers)
        await self._pages_free()
        complete = [answer for answer in answers if answer.error is None]
        failed = [answer for answer in answers if answer.error is not None]
        ended = [a for a in failed if fault.owner and a.is_beginning_of(self.wanted[a.number])]
        lost = [(a.number, str(a.error)) for a in failed if a not in ended]
        return Outcome(
            fault=fault,
            hit=len(hit),
            complete=len(complete),
            lost=lost,
            wrong=[a.number for a in complete if a.content != self.wanted[a.number].content],
            ended=len(ended),
            pauses_s=[answer.pause_s(began_s, ended_s) for answer in hit],
            quiet_s=[answer.pause_s(quiet_s, began_s) for answer in hit],
        )

    async def _learn(self, answers: Iterable[Answer]) -> None:
        """Ask again, without a fault, what has not been asked so before."""
        numbers = sorted({answer.number for answer in answers} - self.wanted.keys())
        wanted = await ask_all(self.stack, numbers, AT_ONCE)
        failed = {number: a.error for number, a in wanted.items() if a.error is not None}
        assert not failed, f"requests fail without a fault: {failed}"
        self.wanted |= wanted

    async def _pages_free(self) -> None:
        await heartbeats(
            self.stack.nats_url,
            lambda beats: all(
                worker in beats
                and (load := beats[worker].worker) is not None
                and load.pages_free == load.pages_total
                for worker in WORKERS
            ),
            TIMEOUT_S,
        )


@asynccontextmanager
async def fault_bed(clients: int) -> AsyncIterator[FaultBed]:
    """A stack with a broker of its own."""
    async with NatsServer(durable=True) as broker:
        running = serving("--bus-url", broker.url, *ARGUMENTS)
        stack = await asyncio.to_thread(running.__enter__)
        try:
            yield FaultBed(stack, broker, clients)
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)


def page(outcomes: Sequence[Outcome], commit: str, clients: int) -> str:
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
        "*hit*: streams that were open. *lost*: requests without an answer. *wrong*: answers that",
        "differ in any byte, finish reason or token count. *ended*: streams of a gateway that was",
        "hit itself, each a beginning of the right answer. *pause*: the longest time without a",
        "piece of a stream that was hit, in seconds; *before*: the same before the fault.",
        "",
        "| fault | hit | complete | lost | wrong | ended | pause, median / p99 | before, p99 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        slowest = np.quantile(one.pauses_s, 0.99)
        lines.append(
            f"| {one.fault.name} | {one.hit} | {one.complete} | {len(one.lost)} | "
            f"{len(one.wrong)} | {one.ended} | {median(one.pauses_s):.1f} / {slowest:.1f} | "
            f"{np.quantile(one.quiet_s, 0.99):.1f} |"
        )
    return "\n".join([*lines, ""])


def commit_here() -> str:
    described = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()


async def main(faults: Sequence[Fault], clients: int) -> list[Outcome]:
    """Let each fault happen."""
    outcomes: list[Outcome] = []
    async with fault_bed(clients) as bed:
        for fault in faults:
            outcomes.append(await bed.suffer(fault))
            one = outcomes[-1]
            print(
                f"{fault.name}: {one.complete} complete, lost {one.lost}, wrong {one.wrong}, "
                f"{one.ended} ended, pause {max(one.pauses_s):.1f} s",
                flush=True,
            )
    return outcomes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--each-kind-once", action="store_true", help="for 3 s at most")
    given = parser.parse_args()
    found = asyncio.run(
        main(EACH_KIND if given.each_kind_once else (*EACH_KIND, *LONGER), given.clients)
    )
    PAGE.write_text(page(found, commit_here(), given.clients))
    sys.exit(any(one.lost or one.wrong for one in found))
