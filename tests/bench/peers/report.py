"""A run against peers as JSON, and the table made of it."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec
from tests.bench.figures import Machine
from tests.bench.peers.peer import OURS
from tests.bench.peers.rounds import Turn
from tests.bench.serving.device import Device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.models import Model
    from tests.bench.peers.cases import Case, Figure
    from tests.bench.peers.peer import Peer

REPOSITORY = Path(__file__).resolve().parents[3]


class Entrant(msgspec.Struct, frozen=True, kw_only=True):
    """One server of the run.

    Attributes:
        config_digest: Of its command line, without what differs from run to run.
        skipped: Why it was not measured.
    """

    name: str
    arithmetic: str
    version: str = ""
    config_digest: str = ""
    skipped: str | None = None


class PeersReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of a run. Prompts follow from case and round, see `rounds.seed_of`.

    Attributes:
        devices: What the machine could do, measured on the quiet machine before each round.
    """

    machine: Machine
    devices: tuple[Device, ...]
    entrants: tuple[Entrant, ...]
    turns: tuple[Turn, ...]

    @property
    def device(self) -> Device:
        """The middle of what was measured."""
        return Device(
            median(device.read_gb_s for device in self.devices),
            median(device.product_gflop_s for device in self.devices),
        )


class Result(msgspec.Struct, frozen=True):
    """One figure of one server: middle and extremes over its rounds."""

    middle: float
    least: float
    most: float
    rounds: int


@dataclass(frozen=True)
class Row:
    """One figure of one case.

    Attributes:
        results: By server; who is missing was not measured undisturbed.
        best: The best peer, ourselves left out.
        ratio: Ours over theirs, round by round; None unless both were measured in some round.
        limit: What the device would allow.
    """

    case: Case
    figure: Figure
    results: dict[str, Result]
    best: str | None
    ratio: Result | None
    limit: float


def entrant(peer: Peer, model: Model) -> Entrant:
    """Describe a server that is installed."""
    return Entrant(
        name=peer.name,
        arithmetic=peer.arithmetic,
        version=peer.version,
        config_digest=config_digest(peer, model),
    )


def config_digest(peer: Peer, model: Model) -> str:
    """Digest a command line, leaving out the port and where things are kept."""
    places = (str(peer.folder.parent.parent), sys.prefix, str(REPOSITORY))
    words = peer.command(model, 0)
    for place in places:
        words = [word.replace(place, "") for word in words]
    said = "\0".join(words)
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def rows(report: PeersReport, cases: Sequence[Case]) -> list[Row]:
    """Compute the table."""
    return [_row(report, case, figure) for case in cases for figure in case.figures]


def _row(report: PeersReport, case: Case, figure: Figure) -> Row:
    values = _values(report, case, figure)
    results = {name: result(list(by_round.values())) for name, by_round in values.items()}
    best = _best(results, figure)
    ratio = None
    if best is not None and OURS in values:
        ours, theirs = values[OURS], values[best]
        ratios = [ours[n] / theirs[n] for n in ours.keys() & theirs.keys()]
        ratio = result(ratios) if ratios else None
    return Row(case, figure, results, best, ratio, figure.limit(report.device))


def _values(report: PeersReport, case: Case, figure: Figure) -> dict[str, dict[int, float]]:
    """Return what counts, by server and round."""
    values: dict[str, dict[int, float]] = {}
    for turn in report.turns:
        for sample in turn.samples:
            if sample.case == case.name and sample.good:
                values.setdefault(sample.peer, {})[sample.round] = figure.of(sample.metrics)
    return values


def _best(results: dict[str, Result], figure: Figure) -> str | None:
    peers = [name for name in results if not name.startswith(OURS)]
    if not peers:
        return None
    choose = max if figure.higher_wins else min
    return choose(peers, key=lambda name: results[name].middle)


def result(values: Sequence[float]) -> Result:
    """Reduce a server's rounds."""
    return Result(median(values), min(values), max(values), len(values))
