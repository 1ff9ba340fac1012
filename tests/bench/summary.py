"""Summaries of benchmark runs: the results that git keeps and docs/benchmarks.md shows.

A file holds one section of the page, measured on one machine, with a row a line. The raw results
of the run are written to `raw/` beside it, which git ignores.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from tests.bench.machine import Device, Machine, machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tests.bench.serving.metrics import Spread

RESULTS = Path(__file__).parent / "results"
RAW = "raw"
PERCENTILES_MIN = 5
"""Fewer values than these have no 10th and 90th percentile."""
DIGITS = 8
"""Significant digits that are kept."""


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


class Measurement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One quantity, reduced. What was not recorded is unset.

    Attributes:
        case: The workload.
        arm: What ran it: a server, a setting, a process.
        quantity: Its name and unit.
        against: Of a ratio, the arm in the denominator.
        n: Number of values.
        value: The only value; instead of `median` and all below it.
        by_round: The values of paired rounds; None where a round has none.
    """

    case: str = ""
    arm: str = ""
    quantity: str
    against: str = ""
    n: int | None = None
    value: float | None = None
    median: float | None = None
    p10: float | None = None
    p90: float | None = None
    p99: float | None = None
    min: float | None = None
    max: float | None = None
    by_round: tuple[float | None, ...] = ()

    @property
    def middle(self) -> float:
        middle = self.value if self.median is None else self.median
        assert middle is not None, f"{self.case} {self.arm} {self.quantity}: no value"
        return middle

    @property
    def least(self) -> float:
        """The minimum, or the only value."""
        return self.middle if self.min is None else self.min

    @property
    def most(self) -> float:
        """The maximum, or the only value."""
        return self.middle if self.max is None else self.max

    def __format__(self, form: str) -> str:
        """Format the middle as `.1f` says, and with a range in parentheses as `.1f span` does.

        `span` is from the minimum to the maximum, `tenths` from the 10th to the 90th percentile.
        """
        form, _, ends = form.partition(" ")
        low, high = (self.p10, self.p90) if ends == "tenths" else (self.least, self.most)
        return (
            f"{self.middle:{form}} ({low:{form}}-{high:{form}})"
            if ends
            else f"{self.middle:{form}}"
        )


class Summary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A section of the page.

    Attributes:
        device: What the machine can do at most; the median where it was measured in each round.
        setup: Settings and sizes of the run.
        notes: What went wrong, and what was left out.
    """

    section: str
    machine: Machine
    device: Device | None = None
    setup: dict[str, str | int | float] = {}
    entrants: tuple[Entrant, ...] = ()
    notes: tuple[str, ...] = ()
    rows: tuple[Measurement, ...] = ()

    def find(
        self, quantity: str, *, case: str | None = None, arm: str | None = None, ratio: bool = False
    ) -> Measurement | None:
        """Return the first row of a quantity; a case or an arm that is None may be any."""
        for row in self.rows:
            if (row.quantity, bool(row.against)) != (quantity, ratio):
                continue
            if case in {None, row.case} and arm in {None, row.arm}:
                return row
        return None

    def row(
        self, quantity: str, *, case: str | None = None, arm: str | None = None, ratio: bool = False
    ) -> Measurement:
        """Return the first row of a quantity, which must exist."""
        found = self.find(quantity, case=case, arm=arm, ratio=ratio)
        assert found is not None, f"{self.section}: no {quantity} of {case}, {arm}"
        return found

    def cases(self) -> list[str]:
        return list(dict.fromkeys(row.case for row in self.rows))

    def arms(self, quantity: str) -> list[str]:
        return list(dict.fromkeys(row.arm for row in self.rows if row.quantity == quantity))


def here(
    section: str,
    setup: Mapping[str, str | int | float],
    rows: Iterable[Measurement],
    *,
    device: Device | None = None,
    notes: Sequence[str] = (),
) -> Summary:
    """Return a summary of what was measured now, on this machine."""
    return Summary(
        section=section,
        machine=machine(),
        device=device,
        setup=dict(setup),
        notes=tuple(notes),
        rows=tuple(rows),
    )


def measured(
    quantity: str,
    values: Iterable[float | None],
    *,
    case: str = "",
    arm: str = "",
    against: str = "",
    by_round: bool = False,
) -> Measurement:
    """Reduce values; None stands for a round without one."""
    rounds = [each if each is None else _rounded(each) for each in values]
    found = [value for value in rounds if value is not None]
    row = Measurement(case=case, arm=arm, quantity=quantity, against=against, n=len(found))
    if len(found) == 1:
        return msgspec.structs.replace(row, value=found[0])
    p10, p90 = _tenths(found)
    return msgspec.structs.replace(
        row,
        median=_rounded(median(found)),
        p10=p10,
        p90=p90,
        min=min(found),
        max=max(found),
        by_round=tuple(rounds) if by_round else (),
    )


def single(quantity: str, value: float, *, case: str = "", arm: str = "") -> Measurement:
    return Measurement(case=case, arm=arm, quantity=quantity, value=_rounded(value))


def of_spread(
    quantity: str, spread: Spread, *, case: str = "", arm: str = "", n: int | None = None
) -> Measurement:
    return Measurement(
        case=case,
        arm=arm,
        quantity=quantity,
        n=n,
        median=_rounded(spread.p50),
        p90=_rounded(spread.p90),
        p99=_rounded(spread.p99),
        max=_rounded(spread.max),
    )


def write(summary: Summary, file: Path) -> None:
    """Write a summary as JSON, each row, entrant and note on a line of its own."""
    fields: dict[str, object] = msgspec.to_builtins(summary)
    parts = [f'"{name}": {_lines(value)}' for name, value in fields.items()]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def write_results(file: Path, raw: object, summary: Summary) -> None:
    """Write a summary, and the raw results under the same name in `raw/` beside it."""
    write(summary, file)
    folder = file.parent / RAW
    folder.mkdir(exist_ok=True)
    (folder / file.name).write_bytes(msgspec.json.format(msgspec.json.encode(raw)) + b"\n")


def report(summary: Summary, file: Path | None, raw: object = None) -> None:
    """Print a summary; write it and the raw results, where there are any, if a file is given."""
    Console(width=140).print(table(summary), *summary.notes, sep="\n")
    if file is not None and raw is None:
        write(summary, file)
    elif file is not None:
        write_results(file, raw, summary)


def arguments(
    prog: str | None = None,
    description: str | None = None,
    *,
    rounds: int | None = None,
    file: str = "",
) -> argparse.ArgumentParser:
    """Return a parser of the options that benchmarks share; `file` is in git, if it is named."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--json",
        type=Path,
        default=RESULTS / file if file else None,
        help="summary file; raw results are written to raw/ beside it",
    )
    return parser


def table(summary: Summary) -> Table:
    setup = ", ".join(f"{name} {value}" for name, value in summary.setup.items())
    shown = Table(title=f"{summary.section}: {setup}")
    for column in ("case", "arm", "quantity"):
        shown.add_column(column)
    for column in ("median", "p10", "p90", "p99", "min", "max"):
        shown.add_column(column, justify="right")
    for row in summary.rows:
        quantity = f"{row.quantity}, against {row.against}" if row.against else row.quantity
        values = (row.middle, row.p10, row.p90, row.p99, row.min, row.max)
        cells = ("" if value is None else f"{value:.5g}" for value in values)
        shown.add_row(row.case, row.arm, quantity, *cells)
    return shown


def read(file: Path) -> Summary:
    return msgspec.json.decode(file.read_bytes(), type=Summary)


def _lines(value: object) -> str:
    if not isinstance(value, (list, tuple)):
        return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()
    rows = ",\n".join(_lines(row) for row in value)
    return f"[\n{rows}\n]"


def _tenths(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """The 10th and 90th percentile, interpolated linearly."""
    if len(values) < PERCENTILES_MIN:
        return None, None
    p10, p90 = (_rounded(float(each)) for each in np.percentile(values, (10, 90)))
    return p10, p90


def _rounded(value: float) -> float:
    return float(value) if float(value).is_integer() else float(f"{value:.{DIGITS}g}")
