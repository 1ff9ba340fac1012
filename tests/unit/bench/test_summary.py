"""Summaries of benchmark runs: how values are reduced, written and read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.bench.machine import Machine
from tests.bench.summary import RAW, RESULTS, Summary, measured, read, single, write, write_results

if TYPE_CHECKING:
    from pathlib import Path

MACHINE = Machine("abc", "cpu", 2, 0.0)
LINES_MAX = 4_000
"""Of all files in git."""


def test_percentiles_are_given_from_five_values_on() -> None:
    row = measured("ms", [1.0, 2.0, 3.0, 4.0, 6.0])
    assert (row.n, row.median, row.min, row.max) == (5, 3.0, 1.0, 6.0)
    assert (row.p10, row.p90) == pytest.approx((1.4, 5.2))
    few = measured("ms", [1.0, 2.0, 3.0, 4.0])
    assert (few.n, few.median, few.p10, few.p90) == (4, 2.5, None, None)


def test_one_value_is_no_distribution() -> None:
    row = measured("ms", [None, 7.0], by_round=True)
    assert (row.n, row.value, row.median, row.by_round) == (1, 7.0, None, ())
    assert (row.middle, row.least, row.most) == (7.0, 7.0, 7.0)


def test_a_round_without_a_value_keeps_its_place() -> None:
    row = measured("ratio", [1.0, None, 2.0], against="other", by_round=True)
    assert (row.n, row.median, row.by_round) == (2, 1.5, (1.0, None, 2.0))


def test_summary_has_a_row_a_line_and_is_read_as_written(tmp_path: Path) -> None:
    rows = (measured("ms", [1.0, 2.0], case="a", arm="x"), single("count", 3, case="b"))
    summary = Summary(section="s", machine=MACHINE, notes=("disturbed",), rows=rows)
    write_results(tmp_path / "s.json", MACHINE, summary)
    assert read(tmp_path / "s.json") == summary
    lines = (tmp_path / "s.json").read_text().splitlines()
    assert [json.loads(line.rstrip(","))["quantity"] for line in lines if "quantity" in line] == [
        "ms",
        "count",
    ]
    assert json.loads((tmp_path / RAW / "s.json").read_text())["commit"] == "abc"


def test_row_is_found_by_quantity_case_and_arm() -> None:
    ratio = measured("ms", [0.5, 0.6], case="a", arm="x", against="y")
    rows = (single("ms", 1, case="a", arm="x"), single("ms", 2, case="a", arm="y"), ratio)
    summary = Summary(section="s", machine=MACHINE, rows=rows)
    assert summary.row("ms", case="a", arm="y").middle == 2
    assert summary.row("ms", ratio=True) is ratio
    assert summary.find("ms", case="b") is None
    assert (summary.cases(), summary.arms("ms")) == (["a"], ["x", "y"])


def test_results_in_git_are_summaries(tmp_path: Path) -> None:
    files = sorted(RESULTS.glob("*.json"))
    assert sum(len(file.read_text().splitlines()) for file in files) < LINES_MAX
    for file in files:
        write(read(file), tmp_path / file.name)
        assert (tmp_path / file.name).read_text() == file.read_text(), file.name
