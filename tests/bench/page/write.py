"""Writes docs/benchmarks.md from the committed results. The page says nothing that they do not."""

from __future__ import annotations

from pathlib import Path

import msgspec
from tests.bench import bodies, loading, planning, share, soak
from tests.bench.__main__ import Report as ServicesReport
from tests.bench.crowd.report import CrowdReport
from tests.bench.figures import INSTRUCTIONS
from tests.bench.kernels import attention, step_report
from tests.bench.page.against_peers import OnProcessor, peers
from tests.bench.page.crowd import crowd
from tests.bench.page.engine import grammar, int8_weights, prose, radix, waiting
from tests.bench.page.open_load import PLOT, open_load
from tests.bench.page.stack import large_bodies, planned, services, soaked
from tests.bench.page.worker import eight_bits, loading_weights, shares, steps
from tests.bench.peers.report import PeersReport
from tests.bench.prose import Report as ProseReport
from tests.bench.serving import int8
from tests.bench.serving.report import RESULTS, drawn, read

PAGE = Path(__file__).resolve().parents[3] / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Written by `make bench-peers` from the files in `tests/bench/results`, which hold every figure.
Definitions are those of SGLang's `bench_serving`: [tests/bench/serving/metrics.py]\
(../tests/bench/serving/metrics.py). Run them again: `make bench-peers`, `make bench-engine`,
`make bench-steps`, `make bench-kernels`, `make bench-loading`, `make bench-serving`, `make bench`,
`make bench-bodies`, `make bench-prose`.
Nothing is measured while anybody else is at work.
"""


def write_page() -> None:
    """Write the page and its plot."""
    PAGE.write_text(page(RESULTS))
    if (file := RESULTS / "open-load.json").exists():
        PAGE.with_name(PLOT).write_text(drawn(read(file)))


def page(results: Path) -> str:
    """Return the page of a folder of results; what was not measured has no section."""
    parts = [HEAD]
    parts += peers([_of_processor(results, name) for name, _ in INSTRUCTIONS])
    if (file := results / "open-load.json").exists():
        parts += open_load(read(file))
    if (file := results / "radix.json").exists():
        parts += radix(read(file))
    if (file := results / "waiting.json").exists():
        parts += waiting(read(file))
    if (file := results / "int8.json").exists():
        parts += int8_weights(int8.read(file), results / "perplexity.json")
    if (file := results / "prose.json").exists():
        parts += prose(msgspec.json.decode(file.read_bytes(), type=ProseReport))
    if (file := results / "steps.json").exists():
        parts += steps(step_report.read(file))
    if (file := results / "share.json").exists():
        parts += shares(share.read(file))
    if (file := results / "planning.json").exists():
        parts += planned(msgspec.json.decode(file.read_bytes(), type=planning.Report))
    if (file := results / "loading.json").exists():
        parts += loading_weights(msgspec.json.decode(file.read_bytes(), type=loading.Report))
    if (file := results / "attention-fp8.json").exists():
        parts += eight_bits(msgspec.json.decode(file.read_bytes(), type=attention.Report))
    if (file := results / "grammar.json").exists():
        parts += grammar(read(file))
    if (file := results / "services.json").exists():
        parts += services(msgspec.json.decode(file.read_bytes(), type=ServicesReport))
    if (file := results / "crowd.json").exists():
        parts += crowd(msgspec.json.decode(file.read_bytes(), type=CrowdReport))
    if (file := results / "bodies.json").exists():
        parts += large_bodies(bodies.read(file))
    if (file := results / "soak.json").exists():
        parts += soaked(msgspec.json.decode(file.read_bytes(), type=soak.Result))
    return "".join(parts)


def _of_processor(results: Path, name: str) -> OnProcessor:
    """What was measured against others with an instruction set."""
    whole, later = (
        msgspec.json.decode(file.read_bytes(), type=PeersReport) if file.exists() else None
        for file in (results / f"peers-{name}.json", results / f"peers-{name}-later.json")
    )
    return OnProcessor(name, whole, later)
