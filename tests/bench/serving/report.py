"""A serving benchmark: its raw results, the summary made of them, and a chart of it as SVG."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import msgspec
from tests.bench.machine import Device, measure_device
from tests.bench.peers.peer import config_digest
from tests.bench.peers.quiet import work
from tests.bench.serving.load import play
from tests.bench.serving.metrics import Metrics, Slo, measure
from tests.bench.summary import Measurement, Summary, here, measured, of_spread, single

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tests.bench.models import Model
    from tests.bench.peers.peer import Peer
    from tests.bench.serving.client import Target
    from tests.bench.serving.load import Arrival, Dataset, Vocabulary


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one server.

    Attributes:
        over: `http`, `chat` (HTTP with the chat template) or `nats`.
        slo: The SLO of goodput; None without one, and in older results.
        others: Share of all cores that other processes used meanwhile; None if unknown.
    """

    name: str
    dataset: str
    arrival: str
    over: str
    seed: int
    metrics: Metrics
    slo: Slo | None = None
    others: float | None = None


@dataclass(frozen=True)
class Load:
    """Requests of a dataset, and when they arrive; `over` as in `Run`."""

    dataset: Dataset
    requests: int
    arrival: Arrival
    over: str = "http"

    async def run(
        self,
        name: str,
        seed: int,
        target: Target,
        words: Vocabulary,
        pid: int | None = None,
        slo: Slo | None = None,
    ) -> Run:
        """Send it to a target, whose process does not count as another, if it is known."""
        scripts = self.dataset.scripts(words, self.requests, seed)
        ours = (os.getpid(), *(() if pid is None else (pid,)))
        before = work(ours)
        timelines = await play(scripts, self.arrival, target)
        others = work(ours).others_since(before)
        for error in sorted({timeline.error for timeline in timelines if timeline.error}):
            print("failed:", error)
        return Run(
            name=name,
            dataset=str(self.dataset),
            arrival=str(self.arrival),
            over=self.over,
            seed=seed,
            metrics=measure(timelines, words.tokens, slo),
            slo=slo,
            others=None if pid is None else round(others, 3),
        )


def summarize(runs: Sequence[Run], device: Device, model: str, digest: str = "") -> Summary:
    """Reduce each run to its rows; `digest` is that of the server's command line, if known."""
    slo = runs[0].slo
    limits = [] if slo is None else slo.promises()
    setup = _setup(runs, model, digest) | {
        "slo": " and ".join(f"{name} <= {most:g} ms" for name, most in limits)
    }
    rows = (row for case, run in zip(_cases(runs), runs, strict=True) for row in _rows(case, run))
    return here("serving", setup, rows, device=device)


def summarize_pairs(
    section: str,
    runs: Sequence[Run],
    by_round: Mapping[str, Sequence[float]],
    counted: Mapping[str, float],
    *,
    peer: Peer,
    model: Model,
) -> Summary:
    """Reduce two runs a pair to a row for each quantity: of all pairs, or counted once."""
    case = model.name
    setup = _setup(runs, case, config_digest(peer, model)) | {"pairs": len(runs) // 2}
    rows = (
        *(measured(name, each, case=case, by_round=True) for name, each in by_round.items()),
        *(single(name, value, case=case) for name, value in counted.items()),
    )
    return here(section, setup, rows, device=measure_device())


def _setup(runs: Sequence[Run], model: str, digest: str) -> dict[str, str | int | float]:
    first = runs[0]
    return {
        "model": model,
        "dataset": first.dataset,
        "over": first.over,
        "config_digest": digest,
    }


def _cases(runs: Sequence[Run]) -> Iterable[str]:
    """Name each run by its arrival process, and by its seed where that is not enough."""
    names = [run.arrival for run in runs]
    for run in runs:
        alone = names.count(run.arrival) == 1
        yield run.arrival if alone else f"{run.arrival}, seed {run.seed}"


def _rows(case: str, run: Run) -> Iterable[Measurement]:
    metrics = run.metrics
    for name, value in (
        ("requests", metrics.requests),
        ("failed", metrics.failed),
        ("output_tokens_per_s", metrics.output_tokens_per_s),
        ("requests_per_s", metrics.requests_per_s),
        ("goodput", metrics.goodput),
        ("concurrency", metrics.concurrency),
        ("others", run.others),
    ):
        if value is not None:
            yield single(name, value, case=case)
    finished = metrics.requests - metrics.failed
    yield of_spread("ttft_ms", metrics.ttft_ms, case=case, n=finished)
    yield of_spread("tpot_ms", metrics.tpot_ms, case=case)
    yield of_spread("itl_ms", metrics.itl_ms, case=case)
    yield of_spread("e2e_ms", metrics.e2e_ms, case=case, n=finished)


def drawn(summary: Summary) -> str:
    """Draw latency against throughput as SVG."""

    def point(case: str, quantity: str, percentile: str) -> tuple[float, float]:
        row = summary.row(quantity, case=case)
        y = row.middle if percentile == "p50" else row.p99 or 0.0
        return summary.row("output_tokens_per_s", case=case).middle, y

    lines = [
        Line(f"{name} {each}", sorted(point(case, quantity, each) for case in summary.cases()))
        for name, quantity in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"))
        for each in ("p50", "p99")
    ]
    setup = summary.setup
    title = f"{setup['model']}, {setup['dataset']}, {summary.machine.commit}"
    return chart(title, "output tok/s", "ms", lines)


WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 40, 50
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Distinguishable for colour-blind readers: Okabe and Ito 2008."""
TICKS = 5
"""How many an axis has beyond zero, at most."""
ROUND = (1, 2, 5, 10)


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]


def chart(title: str, x_name: str, y_name: str, lines: Sequence[Line]) -> str:
    x_ticks = _ticks(max((x for line in lines for x, _ in line.points), default=0.0) or 1.0)
    y_ticks = _ticks(max((y for line in lines for _, y in line.points), default=0.0) or 1.0)
    right, top = x_ticks[-1], y_ticks[-1]

    def x_of(x: float) -> float:
        return LEFT + x / right * (WIDTH - LEFT - RIGHT)

    def y_of(y: float) -> float:
        return HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    parts = [
        _text(WIDTH / 2, 20, title, "middle"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_name, "middle"),
        _text(LEFT, TOP - 8, y_name, "middle"),
        *(_grid(y_of(y), y) for y in y_ticks),
        *(_text(x_of(x), HEIGHT - BOTTOM + 18, f"{x:.3g}", "middle") for x in x_ticks),
    ]
    for n, line in enumerate(lines):
        parts += [_line(n, [(x_of(x), y_of(y)) for x, y in line.points]), _legend(n, line.name)]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _ticks(end: float) -> list[float]:
    """Round numbers from zero to the first one that is no less than `end`."""
    power = 10 ** math.floor(math.log10(end / TICKS))
    step = next(power * each for each in ROUND if power * each * TICKS >= end)
    return [step * n for n in range(math.ceil(end / step) + 1)]


def _grid(height: float, y: float) -> str:
    return (
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"'
        ' stroke="#ddd"/>' + _text(LEFT - 6, height + 4, f"{y:.3g}", "end")
    )


def _line(n: int, places: Iterable[tuple[float, float]]) -> str:
    colour = COLOURS[n % len(COLOURS)]
    at = [(round(x, 1), round(y, 1)) for x, y in places]
    path = " ".join(f"{x},{y}" for x, y in at)
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in at)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'


def _legend(n: int, name: str) -> str:
    x, y = WIDTH - RIGHT + 16, TOP + 10 + 20 * n
    square = (
        f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{COLOURS[n % len(COLOURS)]}"/>'
    )
    return square + _text(x + 16, y, name, "start")


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
