"""A run against peers: the raw results, and the summary made of them."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import msgspec
from tests.bench.machine import Device, Machine, machine, measure_device
from tests.bench.peers.cases import CASES
from tests.bench.peers.peer import OURS, config_digest
from tests.bench.peers.rounds import Turn, play_rounds
from tests.bench.summary import Entrant, Measurement, Summary, measured

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tests.bench.models import Model
    from tests.bench.peers.cases import Case, Figure
    from tests.bench.peers.peer import Peer
    from tests.bench.peers.rounds import Referee
    from tests.bench.serving.metrics import Metrics

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
        """The median over rounds."""
        return Device(
            median(device.read_gb_s for device in self.devices),
            median(device.product_gflop_s for device in self.devices),
        )


def measure(
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
    for figure in case.figures:
        values = _values(report, case, figure.of)
        found += _measured(values, case, figure.title)
        best = _best(values, figure)
        if best is None or OURS not in values:
            continue
        ours, theirs = values[OURS], values[best]
        ratios = [
            ours[n] / theirs[n] if n in ours and n in theirs else None
            for n in sorted(ours.keys() | theirs.keys())
        ]
        if any(ratios):
            found.append(
                measured(
                    figure.title, ratios, case=case.name, arm=OURS, against=best, by_round=True
                )
            )
    titles = {figure.title for figure in case.figures}
    for title, of in OBSERVED.items():
        if title not in titles:
            found += _measured(_values(report, case, of), case, title)
    return found


def _measured(
    values: dict[str, dict[int, float]], case: Case, quantity: str
) -> Iterable[Measurement]:
    for name, by_round in values.items():
        yield measured(quantity, by_round.values(), case=case.name, arm=name)


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
    medians = {
        name: median(by_round.values())
        for name, by_round in values.items()
        if not name.startswith(OURS)
    }
    if not medians:
        return None
    choose: Callable[..., str] = max if figure.higher_wins else min
    return choose(medians, key=lambda name: medians[name])


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
