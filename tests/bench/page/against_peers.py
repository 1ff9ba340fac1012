"""The section that compares servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bench.page.markdown import device_line, markdown
from tests.bench.peers.cases import CASES, Case, Figure

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tests.bench.summary import Summary

HEAD = """
## Against other servers

All servers load the same weights (random values: speed depends on shapes alone) and receive the
same prompts over HTTP. One server runs at a time; the servers take turns, and each is restarted and
warmed up in every round. A cell is the median over rounds, with the minimum and maximum in
parentheses. The ratio is ours to that of the best other server, computed per round; for times,
lower is better. A server more than 1.4x slower than the best peer in round 1 is skipped for that
case in later rounds, and one that a later table lacks was not the best peer of any of its cases in
an earlier table of the same processor. The limit follows from the machine's measured memory and
matrix-multiply rates: [tests/bench/peers/cases.py](../tests/bench/peers/cases.py). Results depend
on the processor's instruction set, so each one measured has its own table.
"""
TITLES = {
    "amx": "With matrix units (AMX)",
    "avx512bf16": "With dot products of bfloat16 (AVX-512)",
    "avx512": "With AVX-512",
    "avx2": "With AVX2",
}
LATER = "\nCases measured later, at another commit:\n"
ROUNDS_MIN = 5


def peers(processors: Mapping[str, Sequence[Summary]]) -> Iterable[str]:
    """Yield the tables of each instruction set: all cases, and some that were measured later."""
    head = HEAD
    for instructions, summaries in processors.items():
        if not summaries:
            continue
        yield head
        head = ""
        yield f"\n### {TITLES[instructions]}\n"
        for number, summary in enumerate(summaries):
            yield LATER if number else ""
            yield from _measured(summary)


def _measured(summary: Summary) -> Iterable[str]:
    names = [each.name for each in summary.entrants if each.skipped is None]
    yield "\n" + device_line(summary) + "\n"
    rounds = int(summary.setup["rounds"])
    caution = "" if rounds >= ROUNDS_MIN else " Too few for a reliable spread."
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
        about = f"skipped: {each.skipped}" if each.skipped else f"{each.version}; {each.arithmetic}"
        yield f"* {each.name}: {about}\n"
    yield from (f"* {note}\n" for note in summary.notes)


def _cells(summary: Summary, case: Case, figure: Figure, names: Sequence[str]) -> Sequence[str]:
    assert summary.device is not None, "servers are measured beside the device"
    rows = [summary.find(figure.title, case=case.name, arm=name) for name in names]
    ratio = summary.find(figure.title, case=case.name, ratio=True)
    targets = " / ".join("" if each is None else f"{each:g}" for each in (figure.must, figure.aim))
    return (
        f"{case.title}: {figure.title}",
        *("not measured" if row is None else f"{row:.0f span}" for row in rows),
        f"**{ratio:.2f}** ({ratio.least:.2f}-{ratio.most:.2f})" if ratio else "",
        ratio.against if ratio else "",
        f"{'>=' if figure.higher_wins else '<='} {targets}",
        f"{figure.limit(summary.device):.0f}",
    )
