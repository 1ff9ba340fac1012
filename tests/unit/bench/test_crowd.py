"""Clients of many streams, the sampling profiler, and the page section of both."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

from tests.bench.crowd.__main__ import LOOP, PARTS, Crowd, Profile, summarize
from tests.bench.crowd.listeners import Listener, Tally, request
from tests.bench.crowd.profiled_gateway import Sampler, Samples, read, write
from tests.bench.page.write import page
from tests.bench.summary import write as write_summary

if TYPE_CHECKING:
    from pathlib import Path

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
    write(sampler.stop(), tmp_path / "samples.json")
    samples = read(tmp_path / "samples.json")
    shares = samples.shares((("this file", ("test_crowd",)),), "rest")
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
    write_summary(summarize({"steady": windows}, profiles), tmp_path / "crowd.json")
    text = page(tmp_path)
    assert "| steady | 6390 | 20.0 | 31.5 | 41.0 | gateway-0 31, broker 12 |" in text
    assert "| asyncio | 12.5 |" in text
