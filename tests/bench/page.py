"""Writes docs/benchmarks.md from the committed results. The page says nothing that they do not."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec
from tests.bench import loading
from tests.bench.crowd.report import Crowd, CrowdReport
from tests.bench.kernels import attention, step_report
from tests.bench.peers.cases import CASES
from tests.bench.peers.report import PeersReport, Result, Row, rows
from tests.bench.serving import int8
from tests.bench.serving.report import RESULTS, Report, read

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.bench.figures import Machine
    from tests.bench.serving.device import Device

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Written by `make bench-peers` from the files in `tests/bench/results`, which hold every figure.
Definitions are those of SGLang's `bench_serving`: [tests/bench/serving/metrics.py]\
(../tests/bench/serving/metrics.py). Run them again: `make bench-peers`, `make bench-engine`,
`make bench-steps`, `make bench-kernels`, `make bench-loading`, `make bench-serving`, `make bench`.
Nothing is measured while anybody else is at work.
"""
PEERS_HEAD = """
## Against other servers

The same weights (random: speed depends on shapes alone), the same prompts, over HTTP, one server at
a time, in turn, each started anew and warmed up for each round. A cell is the median of the rounds
and, in brackets, the least and the most. The ratio is ours over the best other server's, round by
round; for times, lower is better. Who was 1.4 times behind another peer in the first round was not
asked that case again. The limit is what the machine would allow by its own measured
rates of reading and multiplying: [tests/bench/peers/limits.py](../tests/bench/peers/limits.py).
"""
LOADING_HEAD = """
## Loading

{model}, {megabytes:.0f} MB of weights in a file that the kernel's cache does not hold, each load in
a process of its own, in turn with a plain read of the same file from its beginning to its end:
medians of {rounds} pairs. The share is of the read just before. Memory is the most that the process
grew by, over the weights as they are kept: [tests/bench/loading.py](../tests/bench/loading.py).
"""
KEPT_HEAD = """
## Attention over a cache in eight bits

Decode steps of one layer, a token a row, on keys and values in bfloat16 and in fp8, in turn; and
the kernel that rotates the heads of {tokens} tokens and keeps their keys and values. Medians and,
in brackets, the 10th and 90th percentile: [tests/bench/kernels/attention.py]\
(../tests/bench/kernels/attention.py).
"""
ROUNDS_MIN = 5
RADIX_HEAD = """
## The radix cache

32 prompts at once that share 768 of 800 tokens, one token out, with the cache and with
`--disable-radix-cache`: medians of {pairs} pairs.
"""
WAITING_HEAD = """
## A long queue

Decode of 64 requests, alone and with 2,000 waiting in the worker: medians of {pairs} pairs.
"""
GRAMMAR_HEAD = """
## Grammars

Decode of 16 at a time, 128 tokens each drawn by chance, with a JSON schema that does not end and
without one: medians of {pairs} pairs, whose order alternates. On a CPU a step waits for its masks,
and all that they take is seen: [tests/bench/serving/grammar.py](../tests/bench/serving/grammar.py).
"""
CROWD_HEAD = """
## Many streams

{streams} chats streamed at a time over HTTP through one gateway, with a worker that says their
tokens at a pace: every 20 ms one each, and as fast as the services take them. A gap is between two
events of a stream, seen by the client; medians of {rounds} windows of 6 s. Broker, services and
clients share the cores: [tests/bench/crowd](../tests/bench/crowd/__main__.py).
"""
CROWD_PROFILE = """
Where the gateway's processor time goes, in percent of it:

"""

INT8_HEAD = """
## Int8 weights

One client of the 0.5B shape, 128 in and 128 out, over HTTP, `--model-linear int8` against bf16,
servers in turn on the same prompts: medians of {pairs} pairs. The limit is what reading one byte a
weight would allow; perplexity is that of conversations that the embedded model was not trained on.
"""
STEPS_HEAD = """
## One step

Whole steps of the {shape} shape in ms, medians and in brackets the tenth and the ninetieth
percentile, all ways in turn: as served, with `--enable-deterministic-inference`, and on torch's
operations.
Beside is what a step takes outside its layers and its head: Python, plan, checks and sampling. The
limit is reading weights and cache at the rate measured beside it.
"""


def write_page() -> None:
    """Write the page."""
    PAGE.write_text(page(RESULTS))


def page(results: Path) -> str:
    """Return the page of a folder of results; what was not measured has no section."""
    parts = [HEAD]
    if (file := results / "peers.json").exists():
        parts += _peers(msgspec.json.decode(file.read_bytes(), type=PeersReport))
    if (file := results / "radix.json").exists():
        parts += _radix(read(file))
    if (file := results / "waiting.json").exists():
        parts += _waiting(read(file))
    if (file := results / "int8.json").exists():
        parts += _int8(int8.read(file), results / "perplexity.json")
    if (file := results / "steps.json").exists():
        parts += _steps(step_report.read(file))
    if (file := results / "loading.json").exists():
        parts += _loading(msgspec.json.decode(file.read_bytes(), type=loading.Report))
    if (file := results / "attention-fp8.json").exists():
        parts += _kept(msgspec.json.decode(file.read_bytes(), type=attention.Report))
    if (file := results / "grammar.json").exists():
        parts += _grammar(read(file))
    if (file := results / "crowd.json").exists():
        parts += _crowd(msgspec.json.decode(file.read_bytes(), type=CrowdReport))
    return "".join(parts)


def _peers(report: PeersReport) -> Iterable[str]:
    names = [each.name for each in report.entrants if each.skipped is None]
    yield PEERS_HEAD + "\n" + _where(report.machine, report.device) + "\n"
    rounds = len({turn.round for turn in report.turns})
    caution = "" if rounds >= ROUNDS_MIN else " Too few to trust the spread."
    yield f"Rounds: {rounds}.{caution}\n\n"
    yield _markdown(
        ("", *names, "ratio", "best other", "must / aim", "limit"),
        (_cells(row, names) for row in rows(report, CASES)),
    )
    yield "\n"
    for each in report.entrants:
        said = f"skipped: {each.skipped}" if each.skipped else f"{each.version}; {each.arithmetic}"
        yield f"* {each.name}: {said}\n"
    yield from _failures(report)


def _cells(row: Row, names: Sequence[str]) -> Sequence[str]:
    figure = row.figure
    wanted = " / ".join("" if each is None else f"{each:g}" for each in (figure.must, figure.aim))
    return (
        f"{row.case.title}: {figure.name}, {figure.unit}",
        *(_shown(row.results.get(name)) for name in names),
        f"**{row.ratio.middle:.2f}** ({row.ratio.least:.2f}-{row.ratio.most:.2f})"
        if row.ratio
        else "",
        row.best or "",
        f"{'>=' if figure.higher_wins else '<='} {wanted}",
        f"{row.limit:.0f}",
    )


def _shown(result: Result | None) -> str:
    if result is None:
        return "not measured"
    return f"{result.middle:.0f} ({result.least:.0f}-{result.most:.0f})"


def _failures(report: PeersReport) -> Iterable[str]:
    """Say what went wrong or was disturbed: it is left out above."""
    samples = [sample for turn in report.turns for sample in turn.samples]
    wrong = {(s.peer, s.case, s.wrong) for s in samples if s.wrong}
    for peer, case, what in sorted(wrong, key=str):
        yield f"* {peer}, {case}, left out: {what}\n"
    for turn in report.turns:
        if turn.failed:
            yield f"* {turn.peer}, round {turn.round + 1}, {turn.model}: {turn.failed}\n"
    disturbed = sum(not sample.good and not sample.wrong for sample in samples)
    if disturbed:
        yield f"* {disturbed} of {len(samples)} samples were disturbed by others and left out\n"


def _radix(report: Report) -> Iterable[str]:
    facts = report.facts
    yield RADIX_HEAD.format(pairs=len(report.runs) // 2) + "\n"
    yield _where(report.machine, report.device) + "\n"
    yield _markdown(
        ("", ""),
        (
            ("times faster", f"{facts['times_faster']:.1f}"),
            ("hit rate", f"{facts['hit_rate']:.4f}"),
            ("hit rate that follows from the prompts", f"{facts['hit_rate_computed']:.4f}"),
        ),
    )


def _waiting(report: Report) -> Iterable[str]:
    facts = report.facts
    yield WAITING_HEAD.format(pairs=len(report.runs) // 2) + "\n"
    yield _where(report.machine, report.device) + "\n"
    yield _markdown(
        ("", ""),
        (
            ("alone, tok/s", f"{facts['tokens_per_s_alone']:.1f}"),
            ("beside 2,000, tok/s", f"{facts['tokens_per_s_beside_2000']:.1f}"),
            ("ratio, pair by pair", f"{facts['ratio']:.3f}"),
            ("until 2,000 more were taken in, s", f"{facts['queue_formed_in_s']:.1f}"),
        ),
    )


def _int8(report: PeersReport, perplexity: Path) -> Iterable[str]:
    found = int8.facts(report)
    if found is None:
        return
    yield INT8_HEAD.format(pairs=found.pairs) + "\n"
    yield _where(report.machine, report.device) + "\n"
    lines = [
        ("bf16, tok/s", f"{found.bf16:.1f}"),
        ("int8, tok/s", f"{found.int8:.1f}"),
        (
            "times faster, pair by pair",
            f"**{found.times_faster:.2f}** ({found.least:.2f}-{found.most:.2f})",
        ),
        ("limit of int8 by the read rate, tok/s", f"{found.limit:.1f}"),
        ("share of that limit", f"{found.int8 / found.limit:.0%}"),
    ]
    if perplexity.exists():
        rounded = msgspec.json.decode(perplexity.read_bytes(), type=_Perplexity).of("int8")
        lines += [
            ("change in perplexity of the embedded model", f"{rounded.change:+.2%}"),
            ("its likeliest token stays the same", f"{rounded.agreement:.2%}"),
        ]
    yield _markdown(("", ""), lines)


def _steps(report: step_report.Report) -> Iterable[str]:
    where = report.machine
    yield STEPS_HEAD.format(shape=report.shape) + "\n"
    yield f"{where.cpu}, {report.isa}, {report.threads} threads, commit {where.commit}.\n\n"
    yield _markdown(
        ("rows x new of all", "default", "deterministic", "its cost", "beside", "torch", "limit"),
        (_step_cells(report, case) for case in report.cases()),
    )


def _step_cells(report: step_report.Report, case: step_report.Case) -> Sequence[str]:
    default, strict, torch = (
        report.of(case, way) for way in (step_report.DEFAULT, step_report.DETERMINISTIC, "torch")
    )
    return (
        f"{case.rows} x {case.new} of {case.kv}",
        f"{default.step.p50:.2f} ({default.step.p10:.2f}-{default.step.p90:.2f})",
        f"{strict.step.p50:.2f} ({strict.step.p10:.2f}-{strict.step.p90:.2f})",
        f"{strict.step.p50 / default.step.p50 - 1:+.1%}",
        f"{default.beside.p50:.2f} ({default.beside.p50 / default.step.p50:.1%})",
        f"{torch.step.p50:.2f}",
        f"{default.limit:.2f}",
    )


class _Rounded(msgspec.Struct, frozen=True):
    """What rounding changes; see `tests.bench.perplexity.Score`."""

    change: float
    agreement: float


class _Linear(msgspec.Struct, frozen=True):
    linear: str
    all: _Rounded


class _Perplexity(msgspec.Struct, frozen=True):
    """What the page needs of `tests.bench.perplexity.Report`, which needs torch."""

    results: list[_Linear]

    def of(self, linear: str) -> _Rounded:
        return next(each.all for each in self.results if each.linear == linear)


def _loading(report: loading.Report) -> Iterable[str]:
    rounds, size = len(report.results[0].rounds), report.file_bytes / 1e6
    yield LOADING_HEAD.format(model=report.model, megabytes=size, rounds=rounds) + "\n"
    yield f"{_who(report.machine)}; the disk reads {report.disk:.0f} MB/s.\n\n"
    yield _markdown(
        ("weights kept", "s", "CPU s", "MB/s", "of the disk's rate", "peak / weights"),
        (
            (
                result.linear,
                f"{result.seconds:.2f}",
                f"{result.cpu_seconds:.2f}",
                f"{result.megabytes_per_s:.0f}",
                f"**{result.rate:.2f}**",
                f"**{result.peak:.2f}**",
            )
            for result in report.results
        ),
    )


def _kept(report: attention.Report) -> Iterable[str]:
    yield KEPT_HEAD.format(tokens=attention.TOKENS) + "\n"
    yield f"{_who(report.machine)}; {report.isa}, {report.threads} threads; reads"
    yield f" {report.memory_gb_s:.1f} GB/s.\n\n"
    yield _markdown(
        ("heads", "rows of tokens", "cache", "ms", "GB/s", "bfloat16 / this"),
        (
            (
                one.shape,
                one.what,
                one.format,
                f"{one.ms.p50:.3f} ({one.ms.p10:.3f}-{one.ms.p90:.3f})",
                f"{one.read_gb_s:.1f}" if one.read_gb_s else "",
                f"**{one.ratio:.2f}**",
            )
            for one in report.results
        ),
    )


def _who(machine: Machine) -> str:
    return f"{machine.cpu}, {machine.cores} cores, commit {machine.commit}"


def _grammar(report: Report) -> Iterable[str]:
    facts = report.facts
    yield GRAMMAR_HEAD.format(pairs=len(report.runs) // 2) + "\n"
    yield _where(report.machine, report.device) + "\n"
    cost, least, most = (100 * facts[name] for name in ("cost", "cost_least", "cost_most"))
    yield _markdown(
        ("", ""),
        (
            ("without, tok/s", f"{facts['tokens_per_s_plain']:.1f}"),
            ("with a schema, tok/s", f"{facts['tokens_per_s_schema']:.1f}"),
            ("cost, pair by pair", f"**{cost:.1f} %** ({least:.1f} to {most:.1f})"),
            ("following 16 tokens, of a step", f"{facts['walks_us']:.0f} us"),
            ("of these, in the grammar", f"{facts['of_walks_accept_us']:.0f} us"),
            ("of these, masks", f"{facts['of_walks_fill_us']:.0f} us"),
            ("masks into the plan", f"{facts['into_the_plan_us']:.0f} us"),
            ("masks into the logits", f"{facts['into_the_logits_us']:.0f} us"),
        ),
    )


def _crowd(report: CrowdReport) -> Iterable[str]:
    rounds = min(map(len, report.windows.values()))
    yield CROWD_HEAD.format(streams=report.streams, rounds=rounds) + "\n"
    machine = report.machine
    yield f"{machine.cpu}, {machine.cores} cores, commit {machine.commit}.\n\n"
    processes = list(next(iter(report.windows.values()))[0].percents)
    yield _markdown(
        ("worker", "events/s", "gap p50, ms", "gap p99, ms", "gateway, us an event", "% of a core"),
        (_crowd_row(name, windows, processes) for name, windows in report.windows.items()),
    )
    yield CROWD_PROFILE
    parts = sorted({part for profile in report.profiles.values() for part in profile.parts})
    yield _markdown(
        ("part", *report.profiles),
        (
            (part, *(f"{profile.parts.get(part, 0.0):.1f}" for profile in report.profiles.values()))
            for part in parts
        ),
    )


def _crowd_row(name: str, windows: Sequence[Crowd], processes: Sequence[str]) -> Sequence[str]:
    shares = {each: median(window.percents[each] for window in windows) for each in processes}
    return (
        name,
        f"{median(window.events_per_s for window in windows):.0f}",
        f"{median(window.gaps_ms[0] for window in windows):.1f}",
        f"{median(window.gaps_ms[2] for window in windows):.1f}",
        f"{median(window.us_an_event for window in windows):.1f}",
        ", ".join(f"{each} {share:.0f}" for each, share in shares.items()),
    )


def _where(machine: Machine, device: Device) -> str:
    return (
        f"{_who(machine)}; reads"
        f" {device.read_gb_s:.1f} GB/s, multiplies {device.product_gflop_s:.0f} GFLOP/s in bf16.\n"
    )


def _markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
