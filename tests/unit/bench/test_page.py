"""Reductions of runs to sections of the page: engine, steps, bodies, and many streams."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.bench.bodies import BODIES, Body, Pair, rows
from tests.bench.crowd import profiled_gateway
from tests.bench.crowd.__main__ import LOOP, PARTS, Crowd, Profile, summarize
from tests.bench.crowd.listeners import Listener, Tally, request
from tests.bench.crowd.profiled_gateway import Sampler, Samples
from tests.bench.machine import Device, Machine
from tests.bench.page.write import page
from tests.bench.peers.rounds import PeersReport, Sample, Turn
from tests.bench.serving import grammar, int8, radix, waiting
from tests.bench.serving.client import Piece, Timeline
from tests.bench.serving.metrics import measure
from tests.bench.serving.report import Run
from tests.bench.summary import RESULTS, Summary, measured, single, write

from antiphon.config.gateway import GatewayConfig

if TYPE_CHECKING:
    from pathlib import Path


MACHINE = Machine("c", "cpu", 2, 0.5)


def steady(first_s: float, gap_s: float, tokens: int = 400) -> Timeline:
    """An answer with a token each `gap_s`."""
    pieces = tuple(Piece(first_s + n * gap_s, "x", n + 1) for n in range(tokens))
    end_s = pieces[-1].at_s
    return Timeline(due_s=0, sent_s=0, ended_s=end_s, pieces=pieces, output_tokens=tokens)


def test_the_rate_of_decode_is_that_of_all_while_all_are_in_the_window() -> None:
    decode = waiting.decoded([steady(1.0, 0.1), steady(2.0, 0.1)])
    assert decode.began_s == pytest.approx(2.0 + 0.1 * waiting.WINDOW[0])
    assert decode.tokens_per_s == pytest.approx(20.0, rel=0.01)
    assert decode.gap_p99_ms == pytest.approx(100.0)


def test_a_slow_start_does_not_count() -> None:
    """A request that was delayed before the window decodes at full rate in it."""
    prompt, held_up = steady(1.0, 0.05), steady(9.0, 0.05)
    for timeline in (prompt, held_up):
        rate = waiting.decoded([timeline] * 4).tokens_per_s
        assert rate == pytest.approx(80.0, rel=0.02)


def test_text_that_comes_in_lumps_was_made_one_token_a_step() -> None:
    timeline = steady(1.0, 0.1)
    lumps = msgspec.structs.replace(timeline, pieces=timeline.pieces[19::20])
    began_s = waiting.decoded([lumps]).began_s
    assert began_s == pytest.approx(waiting.decoded([timeline]).began_s)
    assert waiting.decoded([lumps]).tokens_per_s == pytest.approx(10.0, rel=0.01)


def run(name: str, took_s: float, cached_tokens: int) -> Run:
    timelines = [
        Timeline(
            due_s=0,
            sent_s=0,
            ended_s=took_s,
            prompt_tokens=800,
            output_tokens=1,
            cached_tokens=cached_tokens if n else 0,
        )
        for n in range(radix.REQUESTS)
    ]
    metrics = measure(timelines, len)
    return Run(name=name, dataset="", arrival="", over="nats", seed=0, metrics=metrics)


def test_the_hit_rate_is_held_against_the_one_that_follows_from_the_prompts() -> None:
    runs = [run("cached 0", 2.0, 768), run("not cached 0", 16.0, 0)]
    pairs, counted = radix.by_round(runs), radix.counted(runs)
    assert pairs["times_faster"] == pytest.approx([8.0])
    assert pairs["hit_rate"] == [counted["hit_rate_computed"]]
    assert counted["hit_rate_computed"] == pytest.approx(31 * 768 / (32 * 800))
    assert counted["hit_rate_without_cache"] == 0.0


def turn(number: int, peer: str, tokens_per_s: float, others: float = 0.0) -> Turn:
    """A client that was answered with 128 tokens at this rate."""
    timeline = Timeline(due_s=0, sent_s=0, ended_s=128 / tokens_per_s, output_tokens=128)
    sample = Sample(number, peer, int8.CASE.name, others, measure([timeline], len))
    return Turn(number, peer, int8.CASE.shape.name, 1.0, (sample,))


def pairs(*rates: tuple[float, float], disturbed: float = 0.0) -> PeersReport:
    turns = [
        each
        for number, (bf16, rounded) in enumerate(rates)
        for each in (turn(number, "antiphon", bf16), turn(number, "antiphon int8", rounded))
    ]
    if disturbed:
        turns.append(turn(9, "antiphon", 1.0))
        turns.append(turn(9, "antiphon int8", disturbed, others=0.5))
    devices = (Device(40.0, 500.0),)
    return PeersReport(machine=MACHINE, devices=devices, entrants=(), turns=tuple(turns))


def test_int8_is_held_against_bf16_pair_by_pair() -> None:
    report = pairs((40.0, 72.0), (50.0, 80.0), (60.0, 90.0), disturbed=999.0)
    found = int8.summarize(report)
    assert found.setup["pairs"] == 3
    rates = [found.row(int8.OUTPUT, arm=arm).middle for arm in ("antiphon", "antiphon int8")]
    assert rates == pytest.approx([50.0, 80.0])
    ratio = found.row(int8.OUTPUT, ratio=True)
    assert (ratio.least, ratio.middle, ratio.most) == pytest.approx((1.5, 1.6, 1.8))
    assert int8.summarize(pairs()).rows == ()
    limit = found.row(int8.OUTPUT, arm=int8.LIMIT).middle
    weights = int8.QWEN_05B.weights_count
    assert 0.8 * 40e9 / weights < limit < 40e9 / weights, "a byte of each weight a token"


def test_the_page_shows_int8_and_what_rounding_changes(tmp_path: Path) -> None:
    write(int8.summarize(pairs((50.0, 80.0))), tmp_path / "int8.json")
    assert "same argmax token" not in page(tmp_path)
    (tmp_path / "perplexity.json").write_bytes((RESULTS / "perplexity.json").read_bytes())
    text = page(tmp_path)
    assert "| speedup per pair | **1.60** (1.60-1.60) |" in text
    assert "change in perplexity" in text


def test_the_page_shows_what_determinism_costs_a_step(tmp_path: Path) -> None:
    times = {"deterministic": 10.2, "default": 10.0, "torch": 30.0}
    case, beside = "16 x 1 of 256", [0.4, 0.4, 0.5, 0.6, 0.6]
    found = (
        *(measured("step_ms", [ms] * 5, case=case, arm=way) for way, ms in times.items()),
        measured("beside_ms", beside, case=case, arm="default"),
        single("limit_ms", 6.0, case=case, arm="default"),
    )
    setup: dict[str, str | int | float] = {"shape": "llama-135m", "isa": "avx512", "threads": 2}
    summary = Summary(section="steps", machine=MACHINE, setup=setup, rows=found)
    write(summary, tmp_path / "steps.json")
    (line,) = (line for line in page(tmp_path).splitlines() if line.startswith("| 16 x 1"))
    assert "| +2.0% | 0.50 (5.0%) | 30.00 | 6.00 |" in line


def test_cost_of_a_grammar_is_computed_pair_by_pair() -> None:
    rates = {"plain": (1000.0, 900.0, 1100.0), "schema": (980.0, 891.0, 1089.0)}
    runs = [
        msgspec.structs.replace(
            run(f"{name} {pair}", 2.0, 0),
            metrics=msgspec.structs.replace(measure([], len), output_tokens_per_s=rate),
        )
        for name, each in rates.items()
        for pair, rate in enumerate(each)
    ]
    pairs = grammar.by_round(sorted(runs, key=lambda each: each.name.split()[1]))
    assert pairs["cost"] == pytest.approx([0.02, 0.01, 0.01])
    assert pairs["tokens_per_s_schema"] == [980.0, 891.0, 1089.0]


BODY_PAIRS = tuple(
    Pair(quiet, loud, loud + 1, 400, 10.0)
    for quiet, loud in ((10.0, 12.0), (10.0, 50.0), (9.0, 19.0))
)


def test_bodies_are_as_large_as_the_gateway_takes() -> None:
    most = GatewayConfig().body_bytes_max
    for body in BODIES:
        assert len(msgspec.json.encode(body.make())) <= 1.3 * most, body.name


def test_page_shows_a_row_a_body_and_the_median_difference(tmp_path: Path) -> None:
    found = rows(Body("Some ids", "/generate", dict), 2_000_000, BODY_PAIRS)
    summary = Summary(
        section="bodies",
        machine=MACHINE,
        setup={"streams": 8, "tokens": 100, "rounds": 3, "difference_ms_max": 300.0},
        rows=tuple(found),
    )
    assert summary.row("difference_ms").middle == 10.0
    write(summary, tmp_path / "bodies.json")
    assert "| Some ids, `/generate` | 2.0 | 400 | 10 | 10 | 19 | 51 | **+10** |" in page(tmp_path)


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'10\r\ndata: {"a": 1}\n\n\r\n'
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))


def test_a_listener_counts_events_and_the_gaps_between_them_and_asks_again() -> None:
    tally, wire = Tally(), Wire()
    listener = Listener(request(1, 800), tally)
    listener.connection_made(wire)
    for piece in (HEAD + EVENT, EVENT * 3, END, HEAD + EVENT, EVENT, EVENT + END):
        listener.data_received(piece)
    assert wire.written == [request(1, 800)] * 3
    assert (tally.begun, tally.events, tally.refused) == (1, 7, b"")
    assert len(tally.gaps) == 3  # one a read within an answer, none over its end


def test_a_listener_knows_when_it_is_refused() -> None:
    tally = Tally()
    Listener(b"", tally).data_received(b"HTTP/1.1 429 Too Many Requests\r\n\r\n")
    assert tally.refused


def busy() -> None:
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass


def test_the_sampler_finds_who_works_and_not_who_waits(tmp_path: Path) -> None:
    sampler = Sampler()
    sampler.start()
    busy()
    threading.Event().wait(0.3)
    profiled_gateway.write(sampler.stop(), tmp_path / "samples.json")
    samples = profiled_gateway.read(tmp_path / "samples.json")
    shares = samples.shares((("this file", ("test_page",)),), "rest")
    assert sum(samples.found.values()) > 10
    assert shares["this file"] > 90
    assert "busy" in next(iter(samples.top()))


def test_each_sample_is_of_the_first_part_that_fits() -> None:
    found = {
        "antiphon/gateway/owner/machine.py:Owner._show": 50,
        "antiphon/gateway/driver.py:Driver._deliver": 30,
        "aiohttp/http_writer.py:StreamWriter.write": 15,
        "uvloop/_noop.py:noop": 5,
    }
    shares = Samples(found).shares(PARTS, LOOP)
    assert list(shares.values()) == [50.0, 30.0, 15.0, 5.0]
    assert next(iter(shares)).startswith("owner")
    assert shares[LOOP] == 5.0


def test_the_page_shows_medians_and_where_the_time_goes(tmp_path: Path) -> None:
    windows = [
        Crowd(
            events_per_s=rate,
            gaps_ms=(20.0, 22.0, 31.5, 90.0),
            percents={"gateway-0": 31.0, "broker": 12.0},
            us_an_event=41.0,
        )
        for rate in (6400.0, 6000.0, 6390.0)
    ]
    profiles = {"steady": Profile({"asyncio": 12.5, LOOP: 87.5}, {})}
    write(summarize({"steady": windows}, profiles), tmp_path / "crowd.json")
    text = page(tmp_path)
    assert "| steady | 6390 | 20.0 | 31.5 | 41.0 | gateway-0 31, broker 12 |" in text
    assert "| asyncio | 12.5 |" in text
