"""`make bench-serving`: load on a server, open or closed loop, over HTTP or NATS.

    python -m tests.bench.serving                         a sweep over Antiphon, started here
    python -m tests.bench.serving --url http://127.0.0.1:30000 --served embedded
    python -m tests.bench.serving --arrival poisson:4 --dataset turns:4:64:64 --slo ttft=500 tpot=50
    python -m tests.bench.serving --nats nats://127.0.0.1:4222 --served NAME

The page's open load (docs/benchmarks.md) is of

    --arrival poisson:1 poisson:2 poisson:3 poisson:4 --dataset turns:4:64:64
    --slo ttft=500 tpot=50 --requests 96 --json tests/bench/results/open-load.json

Without `--url` or `--nats`, `antiphon serve` is started with whatever follows `--`; then each run
begins on an idle machine, and what others used meanwhile is written beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace
from tests.bench.machine import measure_device
from tests.bench.models import CACHE, LLAMA_135M, SHAPES, Model, made
from tests.bench.peers.peer import config_digest, running
from tests.bench.peers.quiet import Busy, wait_until_quiet
from tests.bench.peers.servers import Antiphon
from tests.bench.serving.client import HttpTarget, NatsTarget, Target
from tests.bench.serving.load import (
    FORMS,
    ClosedLoop,
    MultiTurn,
    Vocabulary,
    parse_arrival,
    parse_dataset,
    play,
)
from tests.bench.serving.metrics import Slo
from tests.bench.serving.report import Load, Run, drawn, summarize
from tests.bench.summary import report

from antiphon.client import Client

if TYPE_CHECKING:
    from collections.abc import Sequence


SWEEP = ("closed:1", "closed:4", "closed:16", "closed:64")
WARM_UP_SEED = 1_000_000


def main() -> None:
    arguments = _arguments()
    model = _model(arguments)
    antiphon = Antiphon(arguments.cache, os.cpu_count() or 1, tuple(arguments.serve))
    started = not (arguments.url or arguments.nats)
    device = measure_device()
    with running(antiphon, model) if started else nullcontext() as server:
        served = server.model if server else arguments.served or model.name
        pid = server.pid if server else None
        target, over = _target(arguments, server.url if server else arguments.url, served)
        try:
            runs = asyncio.run(_run_all(arguments, model, target, over, pid))
        except Busy as error:
            sys.exit(f"not measured: {error}")
    digest = config_digest(antiphon, model) if started else ""
    summary = summarize(runs, device, model.name, digest)
    report(summary, arguments.json, runs)
    if arguments.plot:
        arguments.plot.write_text(drawn(summary))


def _target(arguments: argparse.Namespace, url: str, served: str) -> tuple[Target, str]:
    """Return a new connection, and its kind as in `Run.over`."""
    if arguments.nats:
        return NatsTarget(Client(arguments.nats), served), "nats"
    chat = arguments.chat or isinstance(parse_dataset(arguments.dataset), MultiTurn)
    return HttpTarget(url, served, chat=chat), "chat" if chat else "http"


async def _run_all(
    arguments: argparse.Namespace, model: Model, target: Target, over: str, pid: int | None
) -> list[Run]:
    """Play each load; a cache would know the prompts of the one before, so each has its own seed.

    Raises:
        Busy: The machine of a server started here, whose process is `pid`, was not idle in time.
    """
    words, slo = Vocabulary(model.folder), _slo(arguments.slo)
    dataset = parse_dataset(arguments.dataset)
    runs: list[Run] = []
    async with target:
        await play(dataset.scripts(words, 4, WARM_UP_SEED), ClosedLoop(2), target)
        for seed, text in enumerate(arguments.arrival, arguments.seed):
            if pid is not None:
                wait_until_quiet(arguments.quiet_in_s, (pid,))
            load = Load(dataset, arguments.requests, parse_arrival(text, seed), over)
            run = await load.run(text, seed, target, words, pid, slo)
            runs.append(replace(run, dataset=arguments.dataset))
    return runs


def _slo(given: Sequence[str]) -> Slo | None:
    """Read `ttft=500 tpot=50 e2e=9000`, in ms."""
    if not given:
        return None
    pairs = [each.partition("=") for each in given]
    return Slo(**{f"{name}_ms": float(value) for name, _, value in pairs})


def _model(arguments: argparse.Namespace) -> Model:
    if arguments.tokenizer:
        return Model(LLAMA_135M, arguments.tokenizer)
    return made(SHAPES[arguments.model], arguments.cache)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench-serving",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--url", default="", help="URL of a running OpenAI server")
    parser.add_argument("--nats", default="", help="URL of a NATS broker with Antiphon's gateways")
    parser.add_argument("--served", default="", help="name of the model on that server")
    parser.add_argument("--tokenizer", type=Path, help="folder of the model on that server")
    parser.add_argument("--model", choices=list(SHAPES), default=LLAMA_135M.name)
    parser.add_argument("--dataset", default="random:128:128", help=FORMS)
    parser.add_argument("--arrival", nargs="+", default=SWEEP, help="closed:N or poisson:RATE")
    parser.add_argument(
        "--requests", type=int, default=64, help="requests or conversations per run"
    )
    parser.add_argument("--slo", nargs="+", default=(), help="ttft=MS tpot=MS e2e=MS, for goodput")
    parser.add_argument("--chat", action="store_true", help="through the chat template")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quiet-in-s",
        type=float,
        default=60.0,
        help="maximum time to wait for an idle machine before each run of a server started here",
    )
    parser.add_argument(
        "--json", type=Path, help="summary file; raw results are written to raw/ beside it"
    )
    parser.add_argument("--plot", type=Path, help="SVG file of latency against throughput")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("serve", nargs="*", help="after --: arguments of `antiphon serve`")
    return parser.parse_args()


if __name__ == "__main__":
    main()
