"""128 concurrent chat streams through one gateway process, and where its CPU time goes.

Expected before measuring: an event costs the gateway 40 us, so a dedicated core forwards 25,000
events/s. The broker, the detokenizer and the clients share the other core. At 6,400 events/s, a
step of 20 ms, the gateway uses a quarter of a core, and an event waits for those of the same step
before it: 128 x 40 us, 5 ms for the last one.

    python -m tests.bench.crowd
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import msgspec
from tests.bench.crowd import profiled_gateway
from tests.bench.crowd.listeners import Listeners
from tests.bench.crowd.profiled_gateway import read
from tests.bench.services import GATEWAY, echo_stack
from tests.bench.summary import Measurement, Summary, arguments, here, measured, report, single
from tests.support.nats import NatsServer
from tests.system.stack import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence


STREAMS = 128
ROUNDS = 3
LISTENERS = Listeners(STREAMS, answer_tokens=800, settle_s=2.0, window_s=6.0)
STEPS_S = {"steady": 0.02, "hasty": 0.004}
"""Of the workers: 6,400 tokens/s, and 32,000, which is more than any gateway forwards."""
PROFILED = "tests.bench.crowd.profiled_gateway"
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


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """One window: gaps as in `Heard`, percents of a core by process, and the gateway's time."""

    events_per_s: float
    gaps_ms: tuple[float, float, float, float]
    percents: dict[str, float]
    us_an_event: float


class Profile(msgspec.Struct, frozen=True):
    parts: dict[str, float]
    functions: dict[str, float]


def summarize(windows: dict[str, list[Crowd]], profiles: dict[str, Profile]) -> Summary:
    rows = [row for case, found in windows.items() for row in _rows(case, found)]
    rows += [
        single("percent_of_gateway", share, case=case, arm=part)
        for case, profile in profiles.items()
        for part, share in profile.parts.items()
    ]
    setup = {"streams": STREAMS, "rounds": min(map(len, windows.values()))}
    return here("crowd", setup, rows)


def _rows(case: str, windows: Sequence[Crowd]) -> list[Measurement]:
    percentiles = ("p50", "p90", "p99", "max")
    gaps = zip(percentiles, zip(*(each.gaps_ms for each in windows), strict=True), strict=True)
    return [
        measured("events_per_s", (each.events_per_s for each in windows), case=case),
        *(measured(f"gap_{name}_ms", values, case=case) for name, values in gaps),
        measured("gateway_us_per_event", (each.us_an_event for each in windows), case=case),
        *(
            measured("percent_of_core", (w.percents[name] for w in windows), case=case, arm=name)
            for name in windows[0].percents
        ),
    ]


async def run(rounds: int) -> tuple[dict[str, list[Crowd]], dict[str, Profile]]:
    """Measure on a broker and a stack of its own a window; then profile, which costs a little."""
    windows: dict[str, list[Crowd]] = {name: [] for name in STEPS_S}
    profiles: dict[str, Profile] = {}
    for _ in range(rounds):
        for name, step_s in STEPS_S.items():
            window, _ = await _window(step_s, GATEWAY)
            windows[name].append(window)
    for name, step_s in STEPS_S.items():
        _, profile = await _window(step_s, PROFILED)
        assert profile is not None, "there is no profile"
        profiles[name] = profile
    return windows, profiles


async def _window(step_s: float, gateway: str) -> tuple[Crowd, Profile | None]:
    async with NatsServer() as nats:
        broker = nats.running.process.pid
        return await asyncio.to_thread(_measured, nats.url, broker, step_s, gateway)


def _measured(
    nats_url: str, broker: int, step_s: float, gateway: str
) -> tuple[Crowd, Profile | None]:
    marks = iter((signal.SIGUSR1, signal.SIGUSR2) if gateway == PROFILED else ())
    with echo_stack(nats_url, step_s, gateway=gateway) as stack:

        def mark() -> None:
            if (signal_ := next(marks, None)) is not None:
                os.kill(stack.pids["gateway-0"], signal_)

        received, used = LISTENERS.measure(stack, {**stack.pids, "broker": broker}, mark)
        seconds = used | {"listeners": received.cpu_s}
        crowd = Crowd(
            events_per_s=round(received.events / received.seconds, 1),
            gaps_ms=received.gaps_ms,
            percents={
                name: round(100 * each / received.seconds, 1) for name, each in seconds.items()
            },
            us_an_event=round(1e6 * used["gateway-0"] / max(1, received.events), 2),
        )
        if gateway != PROFILED:
            return crowd, None
        file = stack.logs / profiled_gateway.FILE
        wait_until(file.exists, 5, "the samples of the profiled gateway")
        samples = read(file)
        return crowd, Profile(samples.shares(PARTS, LOOP), samples.top())


def main() -> None:
    parser = arguments("python -m tests.bench.crowd", rounds=ROUNDS, file="crowd.json")
    parser.add_argument("--dry", action="store_true", help="write no result")
    given = parser.parse_args()
    windows, profiles = asyncio.run(run(given.rounds))
    raw = {"windows": windows, "profiles": profiles}
    report(summarize(windows, profiles), None if given.dry else given.json, raw)


if __name__ == "__main__":
    main()
