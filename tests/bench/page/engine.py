"""The sections of the engine: prefix cache, queue, int8 weights and grammars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bench.page.markdown import device_line, machine_line, markdown, rows
from tests.bench.peers.peer import OURS
from tests.bench.serving import int8

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.bench.summary import Summary

RADIX_HEAD = """
## Prefix cache

32 concurrent prompts of 800 tokens that share a prefix of 768, with one output token each: with the
radix cache and with `--disable-radix-cache`. Medians of {pairs} pairs.
"""
WAITING_HEAD = """
## Decode beside a long queue

Decode of 64 requests, alone and with 2,000 requests queued. Medians of {pairs} pairs in
alternating order.
"""
GRAMMAR_HEAD = """
## Constrained decoding

16 concurrent requests with 128 sampled output tokens each, with and without a JSON schema that
never completes. Medians of {pairs} pairs in alternating order. On a CPU, filling the masks does not
overlap with the forward pass, so all of its cost shows:
[tests/bench/serving/grammar.py](../tests/bench/serving/grammar.py).
"""
INT8_HEAD = """
## Int8 weights

One client, the 0.5B shape, 128 tokens in and 128 out, over HTTP: `--model-linear int8` against
bf16 on the same prompts, servers in turn. Medians of {pairs} pairs. The limit is the rate at one
byte read per weight. Perplexity is that of the embedded model on conversations from the generator
of its training data, with another seed.
"""


PROSE_HEAD = """
## Perplexity of a real model

{model}, {tokens:,} tokens of this project's documentation in windows of 1,024, each from an empty
cache. Every engine reads the same token ids and the same GGUF file: [tests/bench/prose.py]\
(../tests/bench/prose.py). transformers and Antiphon dequantize the weights and compute in the named
dtype. llama.cpp multiplies quantized weights by activations rounded to eight bits, and keeps keys
and values in float16, so its arithmetic differs.
"""


def prose(summary: Summary) -> Iterable[str]:
    setup = summary.setup
    yield PROSE_HEAD.format(model=setup["model"], tokens=setup["tokens"]) + "\n"
    yield f"{machine_line(summary)}.\n\n"
    yield markdown(
        ("engine", "perplexity", "vs. transformers"),
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
    yield device_line(summary) + "\n"
    yield markdown(
        ("", ""),
        (
            ("speedup", f"{summary.row('times_faster').middle:.1f}"),
            ("hit rate", f"{summary.row('hit_rate').middle:.4f}"),
            (
                "hit rate computed from the prompts",
                f"{summary.row('hit_rate_computed').middle:.4f}",
            ),
        ),
    )


def waiting(summary: Summary) -> Iterable[str]:
    def middle(quantity: str) -> float:
        return summary.row(quantity).middle

    yield WAITING_HEAD.format(pairs=summary.setup["pairs"]) + "\n"
    yield device_line(summary) + "\n"
    yield markdown(
        ("", ""),
        (
            ("alone, tok/s", f"{middle('tokens_per_s_alone'):.1f}"),
            ("with 2,000 queued, tok/s", f"{middle('tokens_per_s_beside_2000'):.1f}"),
            ("ratio per pair", summary.row("ratio").span(".3f")),
            (
                "p99 gap between stream events, alone and with the queue, ms",
                f"{middle('gap_p99_ms_alone'):.0f}, {middle('gap_p99_ms_beside_2000'):.0f}",
            ),
            ("time to queue 2,000 requests, s", f"{middle('queue_formed_in_s'):.1f}"),
        ),
    )


def int8_weights(summary: Summary) -> Iterable[str]:
    if not summary.rows:
        return
    yield INT8_HEAD.format(pairs=summary.setup["pairs"]) + "\n"
    yield device_line(summary) + "\n"
    bf16, rounded, limit = (
        summary.row(int8.OUTPUT, arm=arm).middle for arm in (OURS, int8.Int8.name, int8.LIMIT)
    )
    ratio = summary.row(int8.OUTPUT, ratio=True)
    lines = [
        ("bf16, tok/s", f"{bf16:.1f}"),
        ("int8, tok/s", f"{rounded:.1f}"),
        (
            "speedup per pair",
            f"**{ratio.middle:.2f}** ({ratio.least:.2f}-{ratio.most:.2f})",
        ),
        ("limit of int8 at the read rate, tok/s", f"{limit:.1f}"),
        ("share of that limit", f"{rounded / limit:.0%}"),
    ]
    yield markdown(("", ""), lines)


def int8_perplexity(summary: Summary) -> Iterable[str]:
    """Yield more lines of the table of int8 weights."""
    change, agreement = (
        summary.row(quantity, case="all", arm="int8").middle for quantity in ("change", "agreement")
    )
    yield rows(
        (
            ("change in perplexity", f"{change:+.2%}"),
            ("same argmax token", f"{agreement:.2%}"),
        )
    )


def grammar(summary: Summary) -> Iterable[str]:
    def middle(quantity: str) -> float:
        return summary.row(quantity).middle

    yield GRAMMAR_HEAD.format(pairs=summary.setup["pairs"]) + "\n"
    yield device_line(summary) + "\n"
    row = summary.row("cost")
    cost, least, most = (100 * share for share in (row.middle, row.least, row.most))
    yield markdown(
        ("", ""),
        (
            ("without a schema, tok/s", f"{middle('tokens_per_s_plain'):.1f}"),
            ("with a schema, tok/s", f"{middle('tokens_per_s_schema'):.1f}"),
            ("cost per pair", f"**{cost:.1f} %** ({least:.1f} to {most:.1f})"),
            ("advancing 16 matchers by one token", f"{middle('walks_us'):.0f} us"),
            ("of which accepting tokens", f"{middle('of_walks_accept_us'):.0f} us"),
            ("of which filling masks", f"{middle('of_walks_fill_us'):.0f} us"),
            ("copying masks into the step plan", f"{middle('into_the_plan_us'):.0f} us"),
            ("applying masks to logits", f"{middle('into_the_logits_us'):.0f} us"),
        ),
    )
