"""The sections of the engine: its tree, its queue, int8 weights and grammars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bench.page.markdown import markdown, rows, where, who
from tests.bench.peers.peer import OURS
from tests.bench.serving import int8

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.bench.summary import Summary

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


def prose(summary: Summary) -> Iterable[str]:
    setup = summary.setup
    yield PROSE_HEAD.format(model=setup["model"], tokens=setup["tokens"]) + "\n"
    yield f"{who(summary)}.\n\n"
    yield markdown(
        ("reader", "perplexity", "against transformers"),
        [
            (
                reader,
                f"{summary.row('perplexity', arm=reader).middle:.4f}",
                f"{summary.row('change', arm=reader).middle:+.3%}",
            )
            for reader in summary.arms("perplexity")
        ],
    )


def radix(summary: Summary) -> Iterable[str]:
    yield RADIX_HEAD.format(pairs=summary.setup["pairs"]) + "\n"
    yield where(summary) + "\n"
    yield markdown(
        ("", ""),
        (
            ("times faster", f"{summary.row('times_faster').middle:.1f}"),
            ("hit rate", f"{summary.row('hit_rate').middle:.4f}"),
            (
                "hit rate that follows from the prompts",
                f"{summary.row('hit_rate_computed').middle:.4f}",
            ),
        ),
    )


def waiting(summary: Summary) -> Iterable[str]:
    def middle(quantity: str) -> float:
        return summary.row(quantity).middle

    yield WAITING_HEAD.format(pairs=summary.setup["pairs"]) + "\n"
    yield where(summary) + "\n"
    yield markdown(
        ("", ""),
        (
            ("alone, tok/s", f"{middle('tokens_per_s_alone'):.1f}"),
            ("beside 2,000, tok/s", f"{middle('tokens_per_s_beside_2000'):.1f}"),
            ("ratio, pair by pair", summary.row("ratio").span(".3f")),
            (
                "p99 between two pieces of an answer, alone and beside, ms",
                f"{middle('gap_p99_ms_alone'):.0f}, {middle('gap_p99_ms_beside_2000'):.0f}",
            ),
            ("until 2,000 more were taken in, s", f"{middle('queue_formed_in_s'):.1f}"),
        ),
    )


def int8_weights(summary: Summary) -> Iterable[str]:
    if not summary.rows:
        return
    yield INT8_HEAD.format(pairs=summary.setup["pairs"]) + "\n"
    yield where(summary) + "\n"
    bf16, rounded, limit = (
        summary.row(int8.OUTPUT, arm=arm).middle for arm in (OURS, int8.Int8.name, int8.LIMIT)
    )
    ratio = summary.row(int8.OUTPUT, ratio=True)
    lines = [
        ("bf16, tok/s", f"{bf16:.1f}"),
        ("int8, tok/s", f"{rounded:.1f}"),
        (
            "times faster, pair by pair",
            f"**{ratio.middle:.2f}** ({ratio.least:.2f}-{ratio.most:.2f})",
        ),
        ("limit of int8 by the read rate, tok/s", f"{limit:.1f}"),
        ("share of that limit", f"{rounded / limit:.0%}"),
    ]
    yield markdown(("", ""), lines)


def int8_perplexity(summary: Summary) -> Iterable[str]:
    """More lines of the table of int8 weights."""
    change, agreement = (
        summary.row(quantity, case="all", arm="int8").middle for quantity in ("change", "agreement")
    )
    yield rows(
        (
            ("change in perplexity of the embedded model", f"{change:+.2%}"),
            ("its likeliest token stays the same", f"{agreement:.2%}"),
        )
    )


def grammar(summary: Summary) -> Iterable[str]:
    def middle(quantity: str) -> float:
        return summary.row(quantity).middle

    yield GRAMMAR_HEAD.format(pairs=summary.setup["pairs"]) + "\n"
    yield where(summary) + "\n"
    row = summary.row("cost")
    cost, least, most = (100 * share for share in (row.middle, row.least, row.most))
    yield markdown(
        ("", ""),
        (
            ("without, tok/s", f"{middle('tokens_per_s_plain'):.1f}"),
            ("with a schema, tok/s", f"{middle('tokens_per_s_schema'):.1f}"),
            ("cost, pair by pair", f"**{cost:.1f} %** ({least:.1f} to {most:.1f})"),
            ("following 16 tokens, of a step", f"{middle('walks_us'):.0f} us"),
            ("of these, in the grammar", f"{middle('of_walks_accept_us'):.0f} us"),
            ("of these, masks", f"{middle('of_walks_fill_us'):.0f} us"),
            ("masks into the plan", f"{middle('into_the_plan_us'):.0f} us"),
            ("masks into the logits", f"{middle('into_the_logits_us'):.0f} us"),
        ),
    )
