"""The bodies of the benchmark, and what its page shows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from tests.bench.bodies import BODIES, Body, Pair, rows
from tests.bench.machine import Machine
from tests.bench.page.write import page
from tests.bench.summary import Summary, write

from antiphon.config.gateway import GatewayConfig

if TYPE_CHECKING:
    from pathlib import Path

PAIRS = tuple(
    Pair(quiet, loud, loud + 1, 400, 10.0)
    for quiet, loud in ((10.0, 12.0), (10.0, 50.0), (9.0, 19.0))
)


def test_bodies_are_as_large_as_the_gateway_takes() -> None:
    most = GatewayConfig().body_bytes_max
    for body in BODIES:
        assert len(msgspec.json.encode(body.make())) <= 1.3 * most, body.name


def test_page_shows_a_row_a_body_and_the_median_difference(tmp_path: Path) -> None:
    measured = rows(Body("Some ids", "/generate", dict), 2_000_000, PAIRS)
    summary = Summary(
        section="bodies",
        machine=Machine("abc", "cpu", 2, 0.5),
        setup={"streams": 8, "tokens": 100, "rounds": 3, "difference_ms_max": 300.0},
        rows=tuple(measured),
    )
    assert summary.row("difference_ms").middle == 10.0
    write(summary, tmp_path / "bodies.json")
    assert "| Some ids, `/generate` | 2.0 | 400 | 10 | 10 | 19 | 51 | **+10** |" in page(tmp_path)
