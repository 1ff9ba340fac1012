"""The sections of the engine: its tree, its queue, int8 weights and grammars."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from tests.bench.page.markdown import markdown, where, who
from tests.bench.serving import int8

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.bench.peers.report import PeersReport
    from tests.bench.prose import Report as ProseReport
    from tests.bench.serving.report import Report

RADIX_HEAD = """
## The radix cache

32 prompts at once that share 768 of 800 tokens, one token out, with the cache and with
`--disable-radix-cache`: medians of {pairs} pairs.
"""
WAITING_HEAD = """
## A long queue

Decode of 64 requests, alone and with 2,000 waiting: medians of {pairs} pairs, whose order
alternates.
"""
GRAMMAR_HEAD = """
## Grammars

Decode of 16 at a time, 128 tokens each drawn by chance, with a JSON schema that does not end and
without one: medians of {pairs} pairs, whose order alternates. On a CPU a step waits for its masks,
and all that they take is seen: [tests/bench/serving/grammar.py](../tests/bench/serving/grammar.py).
"""
INT8_HEAD = """
## Int8 weights

One client of the 0.5B shape, 128 in and 128 out, over HTTP, `--model-linear int8` against bf16,
servers in turn on the same prompts: medians of {pairs} pairs. The limit is what reading one byte a
weight would allow; perplexity is that of conversations by the embedded model's grammar, drawn by
another seed than those that it was trained on.
"""


PROSE_HEAD = """
## Perplexity of a real model

{model}, {tokens:,} tokens of this project's own prose in windows of 1,024, each from an empty
cache; every reader gets the same ids and the same file: [tests/bench/prose.py]\
(../tests/bench/prose.py). transformers computes with the numbers that the file's blocks stand for,
and so do we, in the number format that is named. llama.cpp multiplies the blocks with activations
that it rounds to eight bits, and keeps keys and values in float16: its arithmetic is another.
"""


def prose(report: ProseReport) -> Iterable[str]:
    yield PROSE_HEAD.format(model=report.model, tokens=report.tokens) + "\n"
    yield f"{who(report.machine)}.\n\n"
    yield markdown(
        ("reader", "perplexity", "against transformers"),
        [(one.reader, f"{one.perplexity:.4f}", f"{one.change:+.3%}") for one in report.results],
    )


def radix(report: Report) -> Iterable[str]:
    facts = report.facts
    yield RADIX_HEAD.format(pairs=len(report.runs) // 2) + "\n"
    yield where(report.machine, report.device) + "\n"
    yield markdown(
        ("", ""),
        (
            ("times faster", f"{facts['times_faster']:.1f}"),
            ("hit rate", f"{facts['hit_rate']:.4f}"),
            ("hit rate that follows from the prompts", f"{facts['hit_rate_computed']:.4f}"),
        ),
    )


def waiting(report: Report) -> Iterable[str]:
    facts = report.facts
    yield WAITING_HEAD.format(pairs=len(report.runs) // 2) + "\n"
    yield where(report.machine, report.device) + "\n"
    yield markdown(
        ("", ""),
        (
            ("alone, tok/s", f"{facts['tokens_per_s_alone']:.1f}"),
            ("beside 2,000, tok/s", f"{facts['tokens_per_s_beside_2000']:.1f}"),
            (
                "ratio, pair by pair",
                f"{facts['ratio']:.3f} ({facts['ratio_least']:.3f}-{facts['ratio_most']:.3f})",
            ),
            (
                "p99 between two pieces of an answer, alone and beside, ms",
                f"{facts['gap_p99_ms_alone']:.0f}, {facts['gap_p99_ms_beside_2000']:.0f}",
            ),
            ("until 2,000 more were taken in, s", f"{facts['queue_formed_in_s']:.1f}"),
        ),
    )


def int8_weights(report: PeersReport, perplexity: Path) -> Iterable[str]:
    found = int8.facts(report)
    if found is None:
        return
    yield INT8_HEAD.format(pairs=found.pairs) + "\n"
    yield where(report.machine, report.device) + "\n"
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
    yield markdown(("", ""), lines)


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


def grammar(report: Report) -> Iterable[str]:
    facts = report.facts
    yield GRAMMAR_HEAD.format(pairs=len(report.runs) // 2) + "\n"
    yield where(report.machine, report.device) + "\n"
    cost, least, most = (100 * facts[name] for name in ("cost", "cost_least", "cost_most"))
    yield markdown(
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
