"""The bodies of the benchmark, and what its page shows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from tests.bench.bodies import BODIES, Case, Pair, Report, summarize
from tests.bench.figures import Machine
from tests.bench.page.write import page
from tests.bench.summary import write

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


def test_difference_is_the_median_of_the_pairs() -> None:
    assert Case("a", "/a", 1, PAIRS).difference_ms == 10.0


def test_page_shows_a_row_a_body(tmp_path: Path) -> None:
    machine = Machine("abc", "cpu", 2, 0.5)
    report = Report(machine, 8, 100, (Case("Some ids", "/generate", 2_000_000, PAIRS),))
    write(summarize(report), tmp_path / "bodies.json")
    assert "| Some ids, `/generate` | 2.0 | 400 | 10 | 10 | 19 | 51 | **+10** |" in page(tmp_path)
