"""The section of other servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.bench.page.markdown import markdown, where
from tests.bench.peers.cases import CASES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.bench.peers.cases import Case, Figure
    from tests.bench.summary import Measurement, Summary

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
    whole: Summary | None
    later: Summary | None = None


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


def _measured(summary: Summary) -> Iterable[str]:
    names = [each.name for each in summary.entrants if each.skipped is None]
    yield "\n" + where(summary) + "\n"
    rounds = int(summary.setup["rounds"])
    caution = "" if rounds >= ROUNDS_MIN else " Too few to trust the spread."
    yield f"Rounds: {rounds}.{caution}\n\n"
    asked = summary.cases()
    yield markdown(
        ("", *names, "ratio", "best other", "must / aim", "limit"),
        (
            _cells(summary, case, figure, names)
            for case in CASES
            if case.name in asked
            for figure in case.figures
        ),
    )
    yield "\n"
    for each in summary.entrants:
        said = f"skipped: {each.skipped}" if each.skipped else f"{each.version}; {each.arithmetic}"
        yield f"* {each.name}: {said}\n"
    yield from (f"* {note}\n" for note in summary.notes)


def _cells(summary: Summary, case: Case, figure: Figure, names: Sequence[str]) -> Sequence[str]:
    assert summary.device is not None, "peers are measured beside what the machine can do"
    ratio = summary.find(figure.title, case=case.name, ratio=True)
    wanted = " / ".join("" if each is None else f"{each:g}" for each in (figure.must, figure.aim))
    return (
        f"{case.title}: {figure.title}",
        *(_shown(summary.find(figure.title, case=case.name, arm=name)) for name in names),
        f"**{ratio.middle:.2f}** ({ratio.least:.2f}-{ratio.most:.2f})" if ratio else "",
        ratio.against if ratio else "",
        f"{'>=' if figure.higher_wins else '<='} {wanted}",
        f"{figure.limit(summary.device):.0f}",
    )


def _shown(row: Measurement | None) -> str:
    return "not measured" if row is None else row.span(".0f")
