"""128 concurrent chat streams through one gateway process, and where its CPU time goes.

Expected before measuring: an event costs the gateway 40 us, so a dedicated core forwards 25,000
events/s. The broker, the detokenizer and the clients share the other core. At 6,400 events/s, a
step of 20 ms, the gateway uses a quarter of a core, and an event waits for those of the same step
before it: 128 x 40 us, 5 ms for the last one.

    python -m tests.bench.crowd
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from statistics import median
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table
from tests.bench.crowd import gateway as watched
from tests.bench.crowd.listeners import Heard
from tests.bench.crowd.report import Crowd, CrowdReport, Profile, summarize
from tests.bench.crowd.sampler import read
from tests.bench.figures import machine
from tests.bench.services import GATEWAY, echo_stack
from tests.bench.services_cpu import used_s
from tests.bench.summary import RESULTS, write_results
from tests.support.nats import NatsServer
from tests.system.stack import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.bench.services import EchoStack

STREAMS = 128
ROUNDS = 3
SETTLE_S = 2.0
WINDOW_S = 6.0
WORKERS = {"steady": "tests.bench.crowd.steady_worker", "hasty": "tests.bench.crowd.hasty_worker"}
WATCHED = "tests.bench.crowd.gateway"
LOOP = "event loop and system calls"
PARTS = (
    (LOOP, ("asyncio/runners.py", "uvloop/")),  # no function runs but the one that runs the loop
    ("nats-py: receiving messages", ("nats/",)),
    ("aiohttp: chunked encoding, socket writes", ("aiohttp/",)),
    ("message decoding, inbox", ("antiphon/bus/", "antiphon/wire/", "antiphon/service/")),
    ("owner: text deltas", ("antiphon/gateway/owner/",)),
    (
        "event JSON encoding",
        ("antiphon/gateway/http/openai/", "http/core/writer", "gateway/parsing/"),
    ),
    ("hand-over from owner to connection task", ("antiphon/gateway/",)),
    ("metrics", ("prometheus_client/",)),
    ("asyncio", ("asyncio/",)),
)


async def run(rounds: int) -> CrowdReport:
    """Measure on a broker and a stack of its own a window; then watch, which costs a little."""
    windows: dict[str, list[Crowd]] = {name: [] for name in WORKERS}
    profiles: dict[str, Profile] = {}
    for _ in range(rounds):
        for name, worker in WORKERS.items():
            window, _ = await _window(worker, GATEWAY)
            windows[name].append(window)
    for name, worker in WORKERS.items():
        _, profile = await _window(worker, WATCHED)
        assert profile is not None, "there is no profile"
        profiles[name] = profile
    return CrowdReport(machine=machine(), streams=STREAMS, windows=windows, profiles=profiles)


async def _window(worker: str, gateway: str) -> tuple[Crowd, Profile | None]:
    async with NatsServer() as nats:
        broker = nats.running.process.pid
        return await asyncio.to_thread(_measured, nats.url, broker, worker, gateway)


def _measured(
    nats_url: str, broker: int, worker: str, gateway: str
) -> tuple[Crowd, Profile | None]:
    watch = gateway == WATCHED
    with echo_stack(nats_url, worker, gateway) as stack:
        crowd = _listen(stack, broker, watch=watch)
        return crowd, _profile(stack.logs / watched.FILE) if watch else None


def _profile(file: Path) -> Profile:
    wait_until(file.exists, 5, "what the watched gateway found")
    samples = read(file)
    return Profile(samples.shares(PARTS, LOOP), samples.top())


def _listen(stack: EchoStack, broker: int, *, watch: bool) -> Crowd:
    pids = {**stack.pids, "broker": broker}
    module = "tests.bench.crowd.listeners"
    command = [sys.executable, "-m", module, stack.url.rpartition(":")[2], str(STREAMS)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as listeners:
        assert listeners.stdin is not None
        assert listeners.stdout is not None
        assert listeners.stdout.readline() == "ready\n", "the clients did not start"
        time.sleep(SETTLE_S)
        listeners.stdin.write("begin\n")
        before = used_s(pids)
        _tell(stack, signal.SIGUSR1, watch=watch)
        time.sleep(WINDOW_S)
        listeners.stdin.write("end\n")
        _tell(stack, signal.SIGUSR2, watch=watch)
        after = used_s(pids)
        heard = msgspec.json.decode(listeners.stdout.readline(), type=Heard)
    seconds = {name: after[name] - before[name] for name in pids} | {"listeners": heard.cpu_s}
    return Crowd(
        events_per_s=round(heard.events / heard.seconds, 1),
        gaps_ms=heard.gaps_ms,
        percents={name: round(100 * used / heard.seconds, 1) for name, used in seconds.items()},
        us_an_event=round(1e6 * seconds["gateway-0"] / max(1, heard.events), 2),
    )


def _tell(stack: EchoStack, number: signal.Signals, *, watch: bool) -> None:
    if watch:
        os.kill(stack.pids["gateway-0"], number)


def show(report: CrowdReport) -> Table:
    """Lay out the medians."""
    table = Table(title=f"{report.streams} chats at a time: medians of the windows")
    for column in ("worker", "events/s", "gap p50 / p99, ms", "gateway, us an event", "percents"):
        table.add_column(column)
    for name, windows in report.windows.items():
        table.add_row(
            name,
            f"{median(each.events_per_s for each in windows):.0f}",
            f"{median(each.gaps_ms[0] for each in windows):.1f} / "
            f"{median(each.gaps_ms[2] for each in windows):.1f}",
            f"{median(each.us_an_event for each in windows):.1f}",
            ", ".join(
                f"{process} {median(each.percents[process] for each in windows):.0f}"
                for process in windows[0].percents
            ),
        )
    return table


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.crowd")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dry", action="store_true", help="write no result")
    arguments = parser.parse_args()
    report = asyncio.run(run(arguments.rounds))
    Console(width=160).print(show(report), report.profiles)
    if not arguments.dry:
        write_results(RESULTS / "crowd.json", report, summarize(report))


if __name__ == "__main__":
    main()
