"""The section of other servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.bench.page.markdown import markdown, where
from tests.bench.peers.cases import CASES
from tests.bench.peers.report import PeersReport, Result, Row, rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

HEAD = """
## Against other servers

The same weights (random: speed depends on shapes alone), the same prompts, over HTTP, one server at
a time, in turn, each started anew and warmed up for each round. A cell is the median of the rounds
and, in brackets, the least and the most. The ratio is ours over the best other server's, round by
round; for times, lower is better. Who was 1.4 times behind another peer in the first round was not
asked that case again. The limit is what the machine would allow by its own measured
rates of reading and multiplying: [tests/bench/peers/limits.py](../tests/bench/peers/limits.py).
What servers make of a processor differs, so there is a table for each kind that was measured.
"""
TITLES = {
    "amx": "With matrix units (AMX)",
    "avx512bf16": "With dot products of bfloat16 (AVX-512)",
    "avx512": "With AVX-512",
    "avx2": "With AVX2",
}
LATER = "\nCases that were measured by themselves after what they ask of the worker had changed:\n"
ROUNDS_MIN = 5


@dataclass(frozen=True)
class OnProcessor:
    """What was measured on processors of one kind.

    Attributes:
        instructions: Their instruction set, by its name among our kernels.
        later: Of some cases only.
    """

    instructions: str
    whole: PeersReport | None
    later: PeersReport | None = None


def peers(processors: Iterable[OnProcessor]) -> Iterable[str]:
    """One table a kind of processor; nothing if no kind was measured."""
    head = HEAD
    for each in processors:
        if each.whole is None:
            continue
        yield head
        head = ""
        yield f"\n### {TITLES[each.instructions]}\n"
        yield from _measured(each.whole)
        if each.later is not None:
            yield LATER
            yield from _measured(each.later)


def _measured(report: PeersReport) -> Iterable[str]:
    names = [each.name for each in report.entrants if each.skipped is None]
    yield "\n" + where(report.machine, report.device) + "\n"
    rounds = len({turn.round for turn in report.turns})
    caution = "" if rounds >= ROUNDS_MIN else " Too few to trust the spread."
    yield f"Rounds: {rounds}.{caution}\n\n"
    asked = {sample.case for turn in report.turns for sample in turn.samples}
    cases = [case for case in CASES if case.name in asked]
    yield markdown(
        ("", *names, "ratio", "best other", "must / aim", "limit"),
        (_cells(row, names) for row in rows(report, cases)),
    )
    yield "\n"
    for each in report.entrants:
        said = f"skipped: {each.skipped}" if each.skipped else f"{each.version}; {each.arithmetic}"
        yield f"* {each.name}: {said}\n"
    yield from _failures(report)


def _cells(row: Row, names: Sequence[str]) -> Sequence[str]:
    figure = row.figure
    wanted = " / ".join("" if each is None else f"{each:g}" for each in (figure.must, figure.aim))
    return (
        f"{row.case.title}: {figure.name}, {figure.unit}",
        *(_shown(row.results.get(name)) for name in names),
        f"**{row.ratio.middle:.2f}** ({row.ratio.least:.2f}-{row.ratio.most:.2f})"
        if row.ratio
        else "",
        row.best or "",
        f"{'>=' if figure.higher_wins else '<='} {wanted}",
        f"{row.limit:.0f}",
    )


def _shown(result: Result | None) -> str:
    if result is None:
        return "not measured"
    return f"{result.middle:.0f} ({result.least:.0f}-{result.most:.0f})"


def _failures(report: PeersReport) -> Iterable[str]:
    """Say what went wrong or was disturbed: it is left out above."""
    samples = [sample for turn in report.turns for sample in turn.samples]
    wrong = {(s.peer, s.case, s.wrong) for s in samples if s.wrong}
    for peer, case, what in sorted(wrong, key=str):
        yield f"* {peer}, {case}, left out: {what}\n"
    for turn in report.turns:
        if turn.failed:
            yield f"* {turn.peer}, round {turn.round + 1}, {turn.model}: {turn.failed}\n"
    disturbed = sum(not sample.good and not sample.wrong for sample in samples)
    if disturbed:
        yield f"* {disturbed} of {len(samples)} samples were disturbed by others and left out\n"
