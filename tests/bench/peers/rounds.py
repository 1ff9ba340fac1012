"""The measurement: rounds in which every server serves the same prompts in turn.

One server runs at a time. A suspended one would keep its memory, and ours, suspended and resumed,
would rightly declare its own services dead; so each is started for its turn, warmed up, and
measured on every case. The order rotates each round.

The first round measures every server on every case. A server far behind the best peer is skipped
for that case in later rounds: it will not be the best one, and time on an idle machine is scarce.
A server that cannot convert or serve a model is not asked for that model again.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import msgspec
from tests.bench.machine import Device, Machine, machine, measure_device
from tests.bench.peers.cases import CASES, Case, Figure
from tests.bench.peers.peer import OURS, NotHere, Peer, Server, config_digest, running
from tests.bench.peers.quiet import BUSY_MAX, wait_until_quiet, watched
from tests.bench.serving.client import HttpTarget
from tests.bench.serving.load import ClosedLoop, RandomLengths, SharedPrefix, Vocabulary, play
from tests.bench.serving.metrics import Metrics, measure
from tests.bench.summary import Entrant, Measurement, Summary, measured

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tests.bench.models import Model

TRIES = 5
"""Maximum number of attempts to measure a case undisturbed."""
FAR_BEHIND = 1.4
"""A server this many times worse than the best peer in every figure of a case is skipped later."""
WARM_UP_SEED = 1_000_000
WARM_UP = (
    (RandomLengths(128, 16), 1),
    (RandomLengths(128, 16), 16),
    (RandomLengths(128, 16), 64),
    (SharedPrefix(768, 32, 8), 8),
    (RandomLengths(1024, 1), 1),
)


class Sample(msgspec.Struct, frozen=True):
    """One case on one server.

    Attributes:
        others: Share of all cores that other processes used meanwhile.
        wrong: Why it is discarded: failures, or lengths other than requested.
    """

    round: int
    peer: str
    case: str
    others: float
    metrics: Metrics
    wrong: str | None = None

    @property
    def good(self) -> bool:
        return self.wrong is None and self.others <= BUSY_MAX

    @property
    def settled(self) -> bool:
        return self.others <= BUSY_MAX or self.wrong is not None


class Turn(msgspec.Struct, frozen=True):
    """One server's turn in a round: how its start went, and what was measured."""

    round: int
    peer: str
    model: str
    started_in_s: float
    samples: tuple[Sample, ...] = ()
    failed: str | None = None


def print_progress(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


@dataclass(frozen=True)
class Referee:
    """Waits for an idle machine before each case, if it is no rehearsal, and reports progress."""

    quiet_in_s: float | None
    progress: Callable[[str], None] = print_progress

    def wait(self, *ours: int) -> None:
        """Wait until no other process uses the CPU.

        Raises:
            Busy: The machine was not idle in time.
        """
        if self.quiet_in_s is not None:
            wait_until_quiet(self.quiet_in_s, ours)


def play_rounds(
    peers: Sequence[Peer],
    cases: Sequence[tuple[Model, Sequence[Case]]],
    rounds: int,
    referee: Referee,
) -> Iterator[Turn]:
    """Yield every turn as it ends, so that nothing is lost when a later one fails.

    Raises:
        Busy: The machine was not idle in time.
    """
    first: list[Sample] = []
    unable: set[tuple[str, str]] = set()
    for round_ in range(rounds):
        turn = round_ % len(peers)
        for model, all_cases in cases:
            for peer in (*peers[turn:], *peers[:turn]):
                asked = [case for case in all_cases if not round_ or contends(peer, case, first)]
                if not asked or (peer.name, model.name) in unable:
                    continue
                referee.wait()
                referee.progress(f"round {round_ + 1}: {peer.name} on {model.name}")
                played = _turn(round_, peer, model, asked, referee)
                first += played.samples if not round_ else ()
                if played.failed and peer.name != OURS:
                    unable.add((peer.name, model.name))
                yield played


def contends(peer: Peer, case: Case, first: Sequence[Sample]) -> bool:
    """Whether a peer may be the best one of a case, by the first round."""
    measured = [sample for sample in first if sample.case == case.name and sample.good]
    rivals = [sample.metrics for sample in measured if sample.peer != OURS]
    mine = [sample.metrics for sample in measured if sample.peer == peer.name]
    if peer.name == OURS or not mine:
        return True
    return any(figure.times_behind(mine[0], rivals) < FAR_BEHIND for figure in case.figures)


def _turn(round_: int, peer: Peer, model: Model, cases: Sequence[Case], referee: Referee) -> Turn:
    try:
        peer.convert(model)
        with running(peer, model) as server:
            guest = Guest(round_, peer, server, Vocabulary(model.folder), referee)
            samples = asyncio.run(guest.samples(cases))
            return Turn(round_, peer.name, model.name, server.started_in_s, samples)
    except NotHere as error:
        referee.progress(f"  {error}")
        return Turn(round_, peer.name, model.name, 0.0, failed=str(error))


@dataclass(frozen=True)
class Guest:
    round_: int
    peer: Peer
    server: Server
    words: Vocabulary
    referee: Referee

    async def samples(self, cases: Sequence[Case]) -> tuple[Sample, ...]:
        """Warm up with a request of each kind that follows, with prompts that no case has."""
        url, model, ignore_eos = self.server.url, self.server.model, self.peer.ignores_eos
        async with HttpTarget(url, model, ignore_eos=ignore_eos) as target:
            for n, (dataset, clients) in enumerate(WARM_UP):
                if any(case.clients == clients for case in cases):
                    scripts = dataset.scripts(self.words, clients, WARM_UP_SEED + n)
                    await play(scripts, ClosedLoop(clients), target)
            return tuple([await self._sample(target, case) for case in cases])

    async def _sample(self, target: HttpTarget, case: Case) -> Sample:
        """Measure until undisturbed, with new prompts each time; return the best sample."""
        tries: list[Sample] = []
        while len(tries) < TRIES and not (tries and tries[-1].settled):
            self.referee.wait(self.server.pid)
            tries.append(await self._try(target, case, seed_of(case, self.round_, len(tries))))
            figures = ", ".join(f"{f.name} {f.of(tries[-1].metrics):.1f}" for f in case.figures)
            others, wrong = tries[-1].others, tries[-1].wrong or ""
            self.referee.progress(f"  {case.name}: {figures} (others {others:.0%}) {wrong}")
        return min(tries, key=lambda each: each.others)

    async def _try(self, target: HttpTarget, case: Case, seed: int) -> Sample:
        scripts = case.dataset.scripts(self.words, case.requests, seed)
        playing = play(scripts, ClosedLoop(case.clients), target)
        timelines, others = await watched(playing, self.server.pid)
        metrics = measure(timelines, self.words.tokens)
        errors = [timeline.error for timeline in timelines if timeline.error]
        wrong = _wrong(case, metrics, errors)
        return Sample(self.round_, self.peer.name, case.name, round(others, 3), metrics, wrong)


def seed_of(case: Case, round_: int, try_: int = 0) -> int:
    """The prompts of a case in a round: the same for every server, new in every round."""
    digest = hashlib.sha256(f"{case.name}/{round_}/{try_}".encode()).digest()
    return int.from_bytes(digest[:6])


def _wrong(case: Case, metrics: Metrics, errors: Sequence[str]) -> str | None:
    if errors:
        return f"{len(errors)} of {metrics.requests} failed: {errors[0]}"
    output_tokens = case.dataset.output_tokens * case.requests
    if metrics.output_tokens != output_tokens:
        return f"{metrics.output_tokens} tokens out instead of {output_tokens}"
    prompt_tokens = case.dataset.prompt_tokens * case.requests
    if metrics.prompt_tokens != prompt_tokens:
        return f"{metrics.prompt_tokens} tokens in instead of {prompt_tokens}"
    return None


OBSERVED: dict[str, Callable[[Metrics], float]] = {
    "TTFT p50, ms": lambda metrics: metrics.ttft_ms.p50,
    "ITL p50, ms": lambda metrics: metrics.itl_ms.p50,
    "ITL p99, ms": lambda metrics: metrics.itl_ms.p99,
}
"""Recorded for every case, beside its own figures."""


class PeersReport(msgspec.Struct, frozen=True, kw_only=True):
    """Raw results of a run. Prompts follow from case and round, see `rounds.seed_of`.

    Attributes:
        devices: Limits of the machine, measured while it was idle in each round.
    """

    machine: Machine
    devices: tuple[Device, ...]
    entrants: tuple[Entrant, ...]
    turns: tuple[Turn, ...]

    @property
    def device(self) -> Device:
        return Device(
            median(device.read_gb_s for device in self.devices),
            median(device.product_gflop_s for device in self.devices),
        )


def reports(
    peers: Sequence[Peer],
    entrants: Sequence[Entrant],
    cases: Sequence[tuple[Model, Sequence[Case]]],
    rounds: int,
    referee: Referee,
) -> Iterator[PeersReport]:
    """Run the rounds; yield the report after every turn, so that no result is lost.

    Raises:
        Busy: The machine was not idle in time.
    """
    where, devices, turns = machine(), list[Device](), list[Turn]()
    for turn in play_rounds(peers, cases, rounds, referee):
        turns.append(turn)
        if len(devices) <= turn.round:
            referee.wait()
            devices.append(measure_device())
        yield PeersReport(
            machine=where, devices=tuple(devices), entrants=tuple(entrants), turns=tuple(turns)
        )


def entrant(peer: Peer, model: Model) -> Entrant:
    return Entrant(
        name=peer.name,
        arithmetic=peer.arithmetic,
        version=peer.version,
        config_digest=config_digest(peer, model),
    )


def summarize(report: PeersReport) -> Summary:
    asked = {sample.case for turn in report.turns for sample in turn.samples}
    return Summary(
        section="peers",
        machine=report.machine,
        device=report.device,
        setup={"rounds": len({turn.round for turn in report.turns})},
        entrants=report.entrants,
        notes=tuple(_notes(report)),
        rows=tuple(row for case in CASES if case.name in asked for row in rows(report, case)),
    )


def rows(report: PeersReport, case: Case) -> list[Measurement]:
    """Reduce a case: each server's figures, and the ratio to the best of the others."""
    found: list[Measurement] = []
    figures = {figure.title: figure for figure in case.figures}
    observed = {title: of for title, of in OBSERVED.items() if title not in figures}
    for title, of in ({title: figure.of for title, figure in figures.items()} | observed).items():
        values = _values(report, case, of)
        found += [
            measured(title, by_round.values(), case=case.name, arm=name)
            for name, by_round in values.items()
        ]
        best = _best(values, figures[title]) if title in figures else None
        if best is None or OURS not in values:
            continue
        ours, theirs = values[OURS], values[best]
        ratios = [
            ours[n] / theirs[n] if n in ours and n in theirs else None
            for n in sorted(ours.keys() | theirs.keys())
        ]
        if any(ratios):
            found.append(
                measured(title, ratios, case=case.name, arm=OURS, against=best, by_round=True)
            )
    return found


def _values(
    report: PeersReport, case: Case, of: Callable[[Metrics], float]
) -> dict[str, dict[int, float]]:
    values: dict[str, dict[int, float]] = {}
    for turn in report.turns:
        for sample in turn.samples:
            if sample.case == case.name and sample.good:
                values.setdefault(sample.peer, {})[sample.round] = of(sample.metrics)
    return values


def _best(values: dict[str, dict[int, float]], figure: Figure) -> str | None:
    others = [name for name in values if not name.startswith(OURS)]
    choose: Callable[..., str | None] = max if figure.higher_wins else min
    return choose(others, key=lambda name: median(values[name].values()), default=None)


def _notes(report: PeersReport) -> Iterable[str]:
    """Return what failed or was disturbed, and is left out of the rows."""
    samples = [sample for turn in report.turns for sample in turn.samples]
    wrong = {(s.peer, s.case, s.wrong) for s in samples if s.wrong}
    for peer, case, what in sorted(wrong, key=str):
        yield f"{peer}, {case}, left out: {what}"
    for turn in report.turns:
        if turn.failed:
            yield f"{turn.peer}, round {turn.round + 1}, {turn.model}: {turn.failed}"
    disturbed = sum(not sample.good and not sample.wrong for sample in samples)
    if disturbed:
        yield f"{disturbed} of {len(samples)} samples were disturbed by others and left out"
