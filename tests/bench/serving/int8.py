"""Speedup of int8 weights end to end: one client of the 0.5B shape, int8 and bf16 in turn.

One server runs at a time, on the same prompts; the order alternates. Decode reads every weight once
a token, so int8 is at most twice as fast, less the time for the KV cache, the services and HTTP.
Expected: 1.6 to 1.8 times.

    python -m tests.bench.serving.int8
    python -m tests.bench.serving.int8 --rehearse    one pair, without waiting for an idle machine
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, ClassVar

from tests.bench.models import CACHE, QWEN_05B, made
from tests.bench.peers.cases import CASES, output_limit
from tests.bench.peers.peer import OURS
from tests.bench.peers.quiet import Busy
from tests.bench.peers.rounds import PeersReport, Referee, entrant, reports
from tests.bench.peers.servers import Antiphon
from tests.bench.summary import RESULTS, Measurement, Summary, measured, report, single

if TYPE_CHECKING:
    from pathlib import Path

    from tests.bench.machine import Device

CASE = next(case for case in CASES if case.shape is QWEN_05B and case.clients == 1)
PAIRS = 5
OUTPUT = CASE.figures[0].title
LIMIT = "limit"
"""The row of what reading a byte a weight would allow."""


class Int8(Antiphon):
    """Antiphon that rounds the weights of its linears to 8 bits."""

    name = f"{OURS} int8"
    arithmetic: ClassVar[str] = "int8 weights, bf16 KV"

    def __init__(self, cache: Path, cores: int) -> None:
        super().__init__(cache, cores, ("--model-linear", "int8"))


def summarize(raw: PeersReport) -> Summary:
    """Reduce a run to the rows of its page section; there are none without an undisturbed pair."""
    pairs = _pairs(raw)
    rows: tuple[Measurement, ...] = ()
    if pairs:
        bf16, int8 = zip(*pairs, strict=True)
        ratios = [b / a for a, b in pairs]
        rows = (
            measured(OUTPUT, bf16, case=CASE.name, arm=OURS, by_round=True),
            measured(OUTPUT, int8, case=CASE.name, arm=Int8.name, by_round=True),
            measured(OUTPUT, ratios, case=CASE.name, arm=Int8.name, against=OURS, by_round=True),
            single(OUTPUT, limit(raw.device), case=CASE.name, arm=LIMIT),
        )
    return Summary(
        section="int8",
        machine=raw.machine,
        device=raw.device,
        setup={"pairs": len(pairs)},
        entrants=raw.entrants,
        rows=rows,
    )


def _pairs(report: PeersReport) -> list[tuple[float, float]]:
    """Return the rates of the rounds in which neither server was disturbed."""
    rates: dict[int, dict[str, float]] = {}
    for turn in report.turns:
        for sample in turn.samples:
            if sample.good:
                rates.setdefault(turn.round, {})[turn.peer] = sample.metrics.output_tokens_per_s
    return [(one[OURS], one[Int8.name]) for one in rates.values() if len(one) == 2]


def limit(device: Device) -> float:
    """Output tok/s of a client where each weight is one byte. Its scales are left out."""
    return output_limit(
        QWEN_05B,
        device,
        rows=CASE.clients,
        new_tokens=CASE.dataset.prompt_tokens,
        prompt_tokens=CASE.dataset.prompt_tokens,
        output=CASE.dataset.output_tokens,
        weight_bytes=1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.serving.int8")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--quiet-in-s", type=float, default=60.0)
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    referee = Referee(None if arguments.rehearse else arguments.quiet_in_s)
    pairs = 1 if arguments.rehearse else arguments.pairs
    model, cores = made(QWEN_05B), os.cpu_count() or 1
    servers = (Antiphon(CACHE, cores), Int8(CACHE, cores))
    entrants = [entrant(server, model) for server in servers]
    try:
        *_, raw = reports(servers, entrants, [(model, (CASE,))], pairs, referee)
    except Busy as error:
        sys.exit(f"not measured: {error}")
    report(summarize(raw), None if arguments.rehearse else RESULTS / "int8.json", raw)


if __name__ == "__main__":
    main()
