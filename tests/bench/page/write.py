"""Writes docs/benchmarks.md from the committed results. The page says nothing that they do not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.figures import INSTRUCTIONS
from tests.bench.page.against_peers import OnProcessor, peers
from tests.bench.page.crowd import crowd
from tests.bench.page.engine import (
    grammar,
    int8_perplexity,
    int8_weights,
    prose,
    radix,
    waiting,
)
from tests.bench.page.open_load import PLOT, open_load
from tests.bench.page.stack import large_bodies, planned, services, soaked
from tests.bench.page.worker import eight_bits, loading_weights, shares, steps
from tests.bench.serving.report import drawn
from tests.bench.summary import RESULTS, Summary, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PAGE = Path(__file__).resolve().parents[3] / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Written by `make bench-peers` from the files in `tests/bench/results`, which hold every figure.
Definitions are those of SGLang's `bench_serving`: [tests/bench/serving/metrics.py]\
(../tests/bench/serving/metrics.py). Run them again: `make bench-peers`, `make bench-engine`,
`make bench-steps`, `make bench-kernels`, `make bench-loading`, `make bench-serving`, `make bench`,
`make bench-bodies`, `make bench-prose`.
Nothing is measured while anybody else is at work.
"""


SECTIONS: tuple[tuple[str, Callable[[Summary], Iterable[str]]], ...] = (
    ("open-load", open_load),
    ("radix", radix),
    ("waiting", waiting),
    ("int8", int8_weights),
    ("prose", prose),
    ("steps", steps),
    ("share", shares),
    ("planning", planned),
    ("loading", loading_weights),
    ("attention-fp8", eight_bits),
    ("grammar", grammar),
    ("services", services),
    ("crowd", crowd),
    ("bodies", large_bodies),
    ("soak", soaked),
)
"""The files below the peers' tables, in the order of the page."""


def write_page() -> None:
    """Write the page and its plot."""
    PAGE.write_text(page(RESULTS))
    if (summary := _read(RESULTS, "open-load")) is not None:
        PAGE.with_name(PLOT).write_text(drawn(summary))


def page(results: Path) -> str:
    """Return the page of a folder of results; what was not measured has no section."""
    parts = [HEAD]
    parts += peers([_of_processor(results, name) for name, _ in INSTRUCTIONS])
    perplexity = _read(results, "perplexity")
    for name, section in SECTIONS:
        if (summary := _read(results, name)) is None:
            continue
        parts += section(summary)
        if section is int8_weights and perplexity is not None:
            parts += int8_perplexity(perplexity)
    return "".join(parts)


def _read(results: Path, name: str) -> Summary | None:
    file = results / f"{name}.json"
    return read(file) if file.exists() else None


def _of_processor(results: Path, name: str) -> OnProcessor:
    """What was measured against others with an instruction set."""
    whole, later = (_read(results, f"peers-{name}{end}") for end in ("", "-later"))
    return OnProcessor(name, whole, later)
