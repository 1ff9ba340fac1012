"""A serving benchmark: its raw results, the summary made of them, and a chart of it as SVG."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING

import msgspec
from matplotlib import rc_context
from matplotlib.figure import Figure
from tests.bench.machine import Device, measure_device
from tests.bench.peers.peer import Peer, config_digest
from tests.bench.peers.quiet import watched
from tests.bench.serving.load import Arrival, Dataset, Vocabulary, play
from tests.bench.serving.metrics import Metrics, Slo, measure
from tests.bench.summary import Measurement, Summary, here, measured, of_spread, single

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tests.bench.models import Model
    from tests.bench.serving.client import Target


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
        playing = play(scripts, self.arrival, target)
        timelines, others = await watched(playing, *([] if pid is None else [pid]))
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
    limits = [] if (slo := runs[0].slo) is None else slo.promises()
    promised = " and ".join(f"{name} <= {most:g} ms" for name, most in limits)
    setup = _setup(runs, model, digest) | {"slo": promised}
    rows = (row for case, run in zip(_cases(runs), runs, strict=True) for row in _rows(case, run))
    return here("serving", setup, rows, device=device)


def by_arm(runs: Sequence[Run], arms: Iterable[str]) -> list[list[Metrics]]:
    """Return the metrics of each arm, in order: a run is named by its arm and its pair."""
    return [[run.metrics for run in runs if run.name.rpartition(" ")[0] == arm] for arm in arms]


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
    dataset, over = runs[0].dataset, runs[0].over
    return {"model": model, "dataset": dataset, "over": over, "config_digest": digest}


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

    def points(quantity: str, percentile: str) -> Iterable[tuple[float, float]]:
        for case in summary.cases():
            row = summary.row(quantity, case=case)
            y = row.middle if percentile == "p50" else row.p99 or 0.0
            yield summary.row("output_tokens_per_s", case=case).middle, y

    setup = summary.setup
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(
        title=f"{setup['model']}, {setup['dataset']}, {summary.machine.commit}",
        xlabel="output tok/s",
        ylabel="ms",
    )
    axes.grid(visible=True)
    for name, quantity in (("TTFT", "ttft_ms"), ("ITL", "itl_ms")):
        for percentile in ("p50", "p99"):
            x, y = zip(*sorted(points(quantity, percentile)), strict=True)
            axes.plot(x, y, marker="o", label=f"{name} {percentile}")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right upper")
    file = StringIO()
    # The same bytes for the same numbers, and words as text.
    with rc_context({"svg.hashsalt": "antiphon", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())
