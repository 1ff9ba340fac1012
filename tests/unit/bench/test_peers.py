"""The comparison of servers: valid samples, the best peer, ratios; and how servers are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.bench.machine import INSTRUCTIONS, Device, Machine, instructions
from tests.bench.models import CACHE, EXPERTS, LLAMA_135M, Model
from tests.bench.page.against_peers import LATER, TITLES
from tests.bench.page.write import page
from tests.bench.peers import rounds as reporting
from tests.bench.peers.__main__ import KINDS
from tests.bench.peers.cases import CASES, Case, output_limit, prefill_s, step_s
from tests.bench.peers.peer import NotHere, Peer, Server, config_digest, running
from tests.bench.peers.quiet import Work, work
from tests.bench.peers.rounds import (
    Guest,
    PeersReport,
    Referee,
    Sample,
    Turn,
    contends,
    seed_of,
    summarize,
)
from tests.bench.peers.servers import Vllm
from tests.bench.serving.metrics import Metrics, Spread, measure
from tests.bench.summary import Entrant, Measurement, write
from tests.system.stack import processes, wait_until

from antiphon.kernels.cpu import extension

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DECODE, BURST = (next(c for c in CASES if c.name == name) for name in ("llama-135m-16", "ttft"))
DEVICE = Device(31.8, 433.0)


def metrics(output_tokens_per_s: float, ttft_ms: float = 0.0) -> Metrics:
    times = Spread(p50=ttft_ms, max=2 * ttft_ms)
    fields = {"output_tokens_per_s": output_tokens_per_s, "ttft_ms": times, "e2e_ms": times}
    return msgspec.structs.replace(measure([], len), **fields)


def turns(peer: str, *values: float, case: str = DECODE.name, others: float = 0.0):
    return [
        Turn(n, peer, "m", 1.0, (Sample(n, peer, case, others, metrics(value, value)),))
        for n, value in enumerate(values)
    ]


def report(*turns: Turn) -> PeersReport:
    names = dict.fromkeys(turn.peer for turn in turns)
    return PeersReport(
        machine=Machine("abc", "cpu", 2, 0.0),
        devices=(DEVICE,),
        entrants=tuple(Entrant(name=name, arithmetic="bf16") for name in names),
        turns=turns,
    )


def ratios(*turns: Turn, case: Case = DECODE) -> list[Measurement | None]:
    summary = summarize(report(*turns))
    return [summary.find(figure.title, case=case.name, ratio=True) for figure in case.figures]


@pytest.mark.parametrize(
    ("played", "expected"),
    [
        (
            [turns("antiphon", 110, 220, 120), turns("vllm", 100, 200, 100)],
            ("vllm", 3, 1.1, (1.1, 1.1, 1.2)),
        ),
        (
            [turns("antiphon", 110, 120, 130), turns("vllm", 100), turns("vllm", 0, 0, 100)[2:]],
            ("vllm", 2, 1.2, (1.1, None, 1.3)),
        ),
        (
            [turns("antiphon", 300, 300), turns("vllm", 100, 100), turns("openvino", 150, 150)],
            ("openvino", 2, 2.0, (2.0, 2.0)),
        ),
    ],
    ids=["round by round", "a round without a pair", "the best peer is the one to beat"],
)
def test_the_ratio_is_that_to_the_best_peer_by_round(
    played: Sequence[list[Turn]], expected: tuple[str, int, float, tuple[float | None, ...]]
) -> None:
    (ratio,) = ratios(*chain(*played))
    assert ratio is not None
    against, n, middle, by_round = expected
    assert (ratio.against, ratio.n) == (against, n)
    assert ratio.by_round == tuple(r if r is None else pytest.approx(r) for r in by_round)
    found = [r for r in by_round if r is not None]
    assert (ratio.middle, ratio.least, ratio.most) == pytest.approx(
        (middle, min(found), max(found))
    )


def test_peer_far_behind_in_the_first_round_is_skipped_for_that_case() -> None:
    played = [
        turns("antiphon", 500),
        turns("openvino", 150),
        turns("vllm", 110),
        turns("llama.cpp", 100),
        turns("openvino", 600, case="ttft"),
        turns("llama.cpp", 900, case="ttft"),
        turns("vllm", 300, case="ttft", others=0.3),
    ]
    first = [sample for (turn,) in played for sample in turn.samples]
    for case in (DECODE, BURST):
        asked = {name for name, kind in KINDS.items() if contends(kind(CACHE, 2), case, first)}
        assert asked == {"antiphon", "openvino", "vllm", "transformers"}


def test_report_grows_by_a_turn_and_has_a_device_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    played = [*turns("antiphon", 110)] * 2 + turns("antiphon", 110, 120)[1:]
    monkeypatch.setattr(reporting, "play_rounds", lambda *_: iter(played))
    monkeypatch.setattr(reporting, "measure_device", lambda: DEVICE)
    found = list(reporting.reports((), (), (), 2, Referee(None, print)))
    assert [len(each.turns) for each in found] == [1, 2, 3]
    assert [each.devices for each in found] == [(DEVICE,), (DEVICE,), (DEVICE, DEVICE)]


def test_a_peer_that_cannot_convert_a_model_is_asked_for_the_others_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Partial(Vllm):
        def prepare(self, model: Model) -> None:
            if model.shape is EXPERTS:
                raise NotHere("no experts")

    @contextmanager
    def serving(peer: Peer, model: Model) -> Iterator[Server]:
        yield Server("", model.name, os.getpid(), 1.0)

    async def no_samples(self: Guest, cases: Sequence[Case]) -> tuple[Sample, ...]:
        return ()

    monkeypatch.setattr(reporting, "running", serving)
    monkeypatch.setattr(reporting, "Vocabulary", lambda _: None)
    monkeypatch.setattr(Guest, "samples", no_samples)
    shapes = [(Model(shape, tmp_path), (DECODE,)) for shape in (EXPERTS, LLAMA_135M)]
    referee = Referee(None, lambda _: None)
    played = list(reporting.play_rounds([Partial(CACHE, 2)], shapes, 2, referee))
    assert [(turn.round, turn.model, turn.failed) for turn in played] == [
        (0, EXPERTS.name, "no experts"),
        (0, LLAMA_135M.name, None),
        (1, LLAMA_135M.name, None),
    ]


def test_for_times_the_lowest_is_best() -> None:
    slow, fast = (turns(p, t, case="ttft") for p, t in (("vllm", 900), ("openvino", 600)))
    first, last = ratios(*turns("antiphon", 300, case="ttft"), *slow, *fast, case=BURST)
    assert first is not None
    assert last is not None
    assert (first.against, last.against) == ("openvino", "openvino")
    assert first.middle == pytest.approx(0.5)


def test_disturbed_and_wrong_samples_count_for_nothing() -> None:
    disturbed = turns("antiphon", 500, others=0.3)
    sample = Sample(1, "antiphon", DECODE.name, 0.0, metrics(9), "no")
    wrong = Turn(1, "antiphon", "m", 1.0, (sample,))
    summary = summarize(report(*disturbed, wrong, *turns("vllm", 100, 100)))
    assert "antiphon" not in summary.arms("output, tok/s")
    assert summary.find("output, tok/s", ratio=True) is None


def test_prompts_differ_between_rounds_and_cases_and_not_between_servers() -> None:
    seeds = [seed_of(case, n, t) for case in CASES for n in range(20) for t in range(3)]
    assert len(set(seeds)) == len(seeds)
    assert seed_of(DECODE, 3) == seed_of(DECODE, 3)


def test_reading_the_weights_limits_one_client_and_multiplying_many() -> None:
    read_s = 2 * LLAMA_135M.weights_count / 31.8e9
    assert step_s(LLAMA_135M, DEVICE, 1, 0) == pytest.approx(read_s)
    products_s = 2 * 256 * LLAMA_135M.weights_count / (DEVICE.product_gflop_s * 1e9)
    assert step_s(LLAMA_135M, DEVICE, 256, 0) == pytest.approx(products_s)
    assert products_s > read_s
    one = output_limit(LLAMA_135M, DEVICE, rows=1, new_tokens=0, prompt_tokens=128, output=128)
    assert one == pytest.approx(1 / read_s, rel=0.03)


def test_prompts_take_the_products_of_layers_and_of_the_keys_before_each_token() -> None:
    rate = DEVICE.product_gflop_s * 1e9
    layers = LLAMA_135M.weights_count - 8192 * 576
    keys = 30 * 2 * 576 * sum(range(1001, 1101))  # of 100 tokens behind 1,000, each its own too
    products = 100 * layers + 8192 * 576 + keys
    found_s = prefill_s(LLAMA_135M, DEVICE, 100, cached=1000)
    assert found_s == pytest.approx(2 * products / rate, rel=1e-9)


def test_every_figure_has_a_limit() -> None:
    assert all(figure.limit(DEVICE) > 0 for case in CASES for figure in case.figures)


def test_a_command_line_has_one_digest_wherever_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests: set[str] = set()
    for cache in (tmp_path / "a", tmp_path / "b"):
        monkeypatch.setattr(sys, "prefix", str(cache / ".venv"))
        monkeypatch.setattr(sys, "executable", str(cache / ".venv" / "bin" / "python"))
        peer = KINDS["antiphon"](cache, 2)
        digests.add(config_digest(peer, Model(LLAMA_135M, cache / "models" / "m")))
    assert len(digests) == 1
    four = KINDS["antiphon"](CACHE, 4)
    assert config_digest(four, Model(LLAMA_135M, CACHE / "models" / "m")) not in digests


def test_the_page_shows_ratio_spread_limit_and_who_was_left_out(tmp_path: Path) -> None:
    given = report(*turns("antiphon", 110, 120), *turns("vllm", 100, 100))
    skipped = Entrant(name="llama.cpp", arithmetic="f16 KV", skipped="cmake is not installed")
    given = msgspec.structs.replace(given, entrants=(*given.entrants, skipped))
    write(summarize(given), tmp_path / "peers-avx2.json")
    text = page(tmp_path)
    line = next(line for line in text.splitlines() if DECODE.title in line)
    assert "**1.15** (1.10-1.20)" in line
    assert "vllm" in line
    assert ">= 1.1 / 1.5" in line
    assert "llama.cpp: skipped: cmake is not installed" in text
    assert "nan" not in text


def test_cases_that_were_measured_later_stand_by_themselves(tmp_path: Path) -> None:
    for name, ours in (("amx", 110.0), ("amx-later", 130.0)):
        given = report(*turns("antiphon", ours), *turns("vllm", 100))
        write(summarize(given), tmp_path / f"peers-{name}.json")
    before, after = page(tmp_path).split(LATER)
    assert "**1.10** (1.10-1.10)" in before
    assert "**1.30** (1.30-1.30)" in after
    shown = [case for case in CASES if f"| {case.title}:" in after]
    assert shown == [DECODE]


def test_each_kind_of_processor_has_its_table(tmp_path: Path) -> None:
    for name, ours in (("avx512bf16", 120.0), ("amx", 110.0)):
        given = report(*turns("antiphon", ours), *turns("vllm", 100))
        write(summarize(given), tmp_path / f"peers-{name}.json")
    text = page(tmp_path)
    assert text.count("## Against other servers") == 1
    before, after = text.split(TITLES["avx512bf16"])
    assert TITLES["amx"] in before
    assert "**1.10** (1.10-1.10)" in before
    assert "**1.20** (1.20-1.20)" in after
    assert TITLES.keys() == {name for name, _ in INSTRUCTIONS}


def test_results_are_kept_by_the_instructions_that_the_kernels_choose() -> None:
    if extension.unavailable_reason() is None:
        assert instructions() == extension.numerics_info()["isa"]


def test_work_of_our_children_is_ours_and_leaves_nothing_for_others() -> None:
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    before = work([os.getpid()])
    subprocess.run([sys.executable, "-c", burn], check=True)
    after = work([os.getpid()])
    assert after.ours_s - before.ours_s >= 0.45
    assert after.machine_s - before.machine_s >= 0.45
    assert work([]).ours_s == 0.0


def test_others_are_what_is_left_of_the_machine() -> None:
    before = Work(at_s=10.0, machine_s=100.0, ours_s=50.0)
    after = Work(at_s=12.0, machine_s=103.0, ours_s=51.0)
    cores = os.cpu_count() or 1
    assert after.others_since(before) == pytest.approx(2.0 / (2.0 * cores))
    assert Work(12.0, 100.5, 50.6).others_since(before) == 0.0  # clocks tick in hundredths


MODEL = Model(LLAMA_135M, Path("nowhere"))
SERVER = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", sys.argv[2]])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): ...
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
BENCHMARK = """
import sys, time
from pathlib import Path
from tests.unit.bench.test_peers import MODEL, Small
from tests.bench.peers.peer import running
with running(Small(Path(sys.argv[1]), 1), MODEL):
    print("up", flush=True)
    time.sleep(60)
"""


class Small(Peer):
    """A server with a child, both with the folder of the test in their command lines."""

    name = "small"
    arithmetic = ""
    script = SERVER

    @property
    def version(self) -> str:
        return "1"

    def install(self) -> None: ...

    def command(self, model: Model, port: int) -> list[str]:
        return [sys.executable, "-c", self.script, str(port), f"mark:{self.folder}"]


class Broken(Small):
    name = "broken"
    script = "import sys; sys.exit('no such thing')"


def alive(cache: Path) -> int:
    return sum(f"mark:{cache / 'peers' / 'small'}" in command for _, command in processes())


def test_a_server_is_stopped_with_its_children(tmp_path: Path) -> None:
    with running(Small(tmp_path, 1), MODEL) as server:
        assert alive(tmp_path) == 2
        assert server.model == MODEL.name
    wait_until(lambda: alive(tmp_path) == 0, 10, "the end of the server")


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(NotHere, match="no such thing"), running(Broken(tmp_path, 1), MODEL):
        pass
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("signal_", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_killed_benchmark(tmp_path: Path, signal_: signal.Signals) -> None:
    benchmark = subprocess.Popen(
        [sys.executable, "-c", BENCHMARK, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with benchmark:
        assert benchmark.stdout is not None
        assert benchmark.stdout.readline() == "up\n"
        assert alive(tmp_path) == 2
        benchmark.send_signal(signal_)
    wait_until(lambda: alive(tmp_path) == 0, 10, "the end of the server")
