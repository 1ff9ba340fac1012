"""`make bench`: what the services add, in time and in processor.

The latency is that from the gateway to the first SSE byte, one request at a time, and where it
goes. Expected before measuring: a bus hop costs 0.15-0.2 ms and a call two of them. Encode is a
call (0.35 ms and 0.1 ms of work), submit is a call (0.35), then admit, tokens and text are a hop
each (0.5), and HTTP itself takes about 0.5 ms: 2 ms in all. The target is 5 ms at the median.

The CPU use is that of the services beside a worker that sends 600 tokens/s to 16 clients. Expected
before measuring: 37.5 steps/s. A step is a batch through the detokenizer (0.3 ms with 16 rows) and
one through the gateway, which writes 16 events (16 x 40 us): a millisecond a step, so 4 % of a
core, and 1 % for heartbeats and open lists. The target is at most 10 %.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

import aiohttp
from tests.bench.crowd.listeners import Listeners
from tests.bench.services import EchoStack, echo_stack
from tests.bench.summary import Measurement, Summary, arguments, here, measured, report
from tests.support.nats import NatsServer

if TYPE_CHECKING:
    from collections.abc import Sequence


WARM_UP = 30
REQUESTS = 300
BODY = {
    "model": "antiphon-small",
    "stream": True,
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "What colour is the sky? " * 4}],
}
HOPS = ("encode_ms", "submit_ms", "queue_ms")
"""As the gateway logs them: to the tokenizer and back, to the leader and back, and from the leader
over worker and detokenizer to the gateway."""
RUNNING, TOKENS_PER_S = 16, 600
STEP_S = RUNNING / TOKENS_PER_S
LISTENERS = Listeners(RUNNING, answer_tokens=100, settle_s=3.0, window_s=10.0)


async def run(rounds: int) -> Summary:
    """Measure on a broker and stacks of its own a round, since the machine is shared."""
    rows: list[Measurement] = []
    cpu: list[tuple[float, dict[str, float]]] = []
    for number in range(rounds):
        async with NatsServer() as nats:
            latency, used = await asyncio.to_thread(_round, nats.url)
        case = f"round {number + 1}"
        rows += [measured(name, values, case=case) for name, values in latency.items()]
        cpu.append(used)
    rows += _cpu_rows(cpu)
    return here("services", {"rounds": rounds}, rows)


def _cpu_rows(rounds: Sequence[tuple[float, dict[str, float]]]) -> list[Measurement]:
    rates, shares = zip(*rounds, strict=True)
    return [
        measured("tokens_per_s", rates, case="cpu"),
        *(
            measured("percent", (each[name] for each in shares), case="cpu", arm=name)
            for name in shares[0]
        ),
    ]


def _round(nats_url: str) -> tuple[dict[str, list[float]], tuple[float, dict[str, float]]]:
    with echo_stack(nats_url) as stack:
        latency = _latency(stack)
    with echo_stack(nats_url, STEP_S) as stack:
        return latency, _measured_cpu(stack)


def _latency(stack: EchoStack) -> dict[str, list[float]]:
    """Return ms to the first SSE byte, seen by the client, and its parts, seen by the gateway."""
    first = asyncio.run(_first_bytes(stack.url))
    lines = [json.loads(line) for line in (stack.logs / "gateway-0.log").read_text().splitlines()]
    ended = [line for line in lines if line.get("event") == "request ended"][-REQUESTS:]
    assert len(ended) == REQUESTS, f"{len(ended)} requests in the gateway's log"
    parts: dict[str, list[float]] = {name: [line[name] for line in ended] for name in HOPS}
    inside = (line["first_ms"] for line in ended)
    parts["http_ms"] = [whole - part for whole, part in zip(first, inside, strict=True)]
    return {**parts, "first_byte_ms": first}


async def _first_bytes(url: str) -> list[float]:
    times: list[float] = []
    async with aiohttp.ClientSession() as session:
        for n in range(WARM_UP + REQUESTS):
            began = time.perf_counter()
            async with session.post(f"{url}/v1/chat/completions", json=BODY) as answer:
                assert answer.status == 200, await answer.text()
                await answer.content.readany()
                took = (time.perf_counter() - began) * 1000
                await answer.read()
            if n >= WARM_UP:
                times.append(took)
    return times


def _measured_cpu(stack: EchoStack) -> tuple[float, dict[str, float]]:
    """Keep 16 streams open, and read what each process but the worker uses of a core.

    Returns:
        Tokens a second, and shares of one core in percent, with `all` for their sum.
    """
    pids = {name: pid for name, pid in stack.pids.items() if name != "worker-0"}
    received, used = LISTENERS.measure(stack, pids)
    rate = round(received.events / received.seconds, 1)
    shares = {name: round(100 * each / received.seconds, 2) for name, each in used.items()}
    assert rate > 0.8 * TOKENS_PER_S, f"the stream is too slow: {rate}, {shares}"
    return rate, shares | {"all": sum(shares.values())}


def main() -> None:
    given = arguments("make bench", rounds=5, file="services.json").parse_args()
    report(asyncio.run(run(given.rounds)), given.json)


if __name__ == "__main__":
    main()
