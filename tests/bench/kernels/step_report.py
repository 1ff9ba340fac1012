"""Times of steps. It needs no torch, so that the page can be written without."""

from __future__ import annotations

import msgspec
from tests.bench.figures import Figure, Machine
from tests.bench.summary import Measurement, Summary, of_figure, single

DETERMINISTIC, DEFAULT = "deterministic", "default"
"""Two of the ways: what determinism costs is the one against the other."""


class Case(msgspec.Struct, frozen=True):
    """A step: so many rows, each of so many new tokens, up to so many in all."""

    rows: int
    new: int
    kv: int

    @property
    def title(self) -> str:
        """As summaries and the page show it."""
        return f"{self.rows} x {self.new} of {self.kv}"


class Result(msgspec.Struct, frozen=True):
    """One case, one way; times in ms.

    Attributes:
        layers: All layers, from the embedding to the final norm.
        beside: All but layers and head: Python, plan, checks, sampling.
    """

    case: Case
    way: str
    step: Figure
    layers: Figure
    beside: Figure
    limit: float


class Report(msgspec.Struct, frozen=True):
    """One run."""

    machine: Machine
    isa: str
    threads: int
    shape: str
    results: list[Result]


def summarize(report: Report) -> Summary:
    """Reduce a run to the rows of its page section."""
    rows: list[Measurement] = []
    for result in report.results:
        case, way = result.case.title, result.way
        rows += [
            of_figure("step_ms", result.step, case=case, arm=way),
            of_figure("layers_ms", result.layers, case=case, arm=way),
            of_figure("beside_ms", result.beside, case=case, arm=way),
            single("limit_ms", result.limit, case=case, arm=way),
        ]
    return Summary(
        section="steps",
        machine=report.machine,
        setup={"shape": report.shape, "isa": report.isa, "threads": report.threads},
        rows=tuple(rows),
    )
