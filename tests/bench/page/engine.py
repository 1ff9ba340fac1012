"""The sections of the engine: open-loop load, prefix cache, queue, int8 weights and grammars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bench.page.markdown import device_line, facts, lines, machine_line, markdown, rows
from tests.bench.peers.peer import OURS
from tests.bench.serving import int8

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.bench.summary import Measurement, Summary

PLOT = "open-load.svg"
OPEN_LOAD_HEAD = """
## Open-loop load (Poisson arrivals)

Multi-turn conversations, the {model} shape, over HTTP. Conversations start at random times (a
Poisson process), and each turn follows the previous response. Dataset `{dataset}`: turns, input
tokens and output tokens. A row is one run, including its ramp-up and ramp-down. Times are p50 and
p99 in ms. Goodput counts requests with {slo}.
"""
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
UPKEEP_HEAD = """
## Heartbeats and KV events

Throughput of 64 clients with the defaults, and with heartbeats each 60 s and no KV events. Medians
of {pairs} pairs in alternating order, a new stack for each run.
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


def open_load(summary: Summary) -> Iterable[str]:
    setup = summary.setup
    yield OPEN_LOAD_HEAD.format_map(setup | {"slo": setup["slo"] or "no SLO: none was set"}) + "\n"
    yield device_line(summary) + "\n"
    yield markdown(
        (
            *("conversations/s", "requests", "out tok/s", "TTFT", "TPOT", "ITL", "requests/s"),
            *("goodput", "CPU of other processes, %"),
        ),
        (_cells(summary, case) for case in summary.cases()),
    )
    yield f"\n![Latency against throughput]({PLOT})\n"


def _cells(summary: Summary, case: str) -> Sequence[str]:
    def row(quantity: str) -> Measurement:
        return summary.row(quantity, case=case)

    requests = row("requests").middle
    goodput = summary.find("goodput", case=case)
    others = summary.find("others", case=case)
    return (
        case.removeprefix("poisson:"),
        f"{requests - row('failed').middle:.0f} of {requests:.0f}",
        f"{row('output_tokens_per_s'):.0f}",
        *(f"{row(name):.0f}, {row(name).p99:.0f}" for name in ("ttft_ms", "tpot_ms", "itl_ms")),
        f"{row('requests_per_s'):.2f}",
        "" if goodput is None else f"{goodput:.2f}",
        "not measured" if others is None else f"{100 * others.middle:.0f}",
    )


def prose(summary: Summary) -> Iterable[str]:
    setup = summary.setup
    yield PROSE_HEAD.format(model=setup["model"], tokens=setup["tokens"]) + "\n"
    yield f"{machine_line(summary)}.\n\n"
    yield markdown(
        ("engine", "perplexity", "vs. transformers"),
        lines(summary, "{perplexity:.4f}", "{change:+.3%}", by="arm"),
    )


def radix(summary: Summary) -> Iterable[str]:
    yield RADIX_HEAD.format(pairs=summary.setup["pairs"]) + "\n"
    yield device_line(summary) + "\n"
    yield facts(
        summary,
        ("speedup", "{times_faster:.1f}"),
        ("hit rate", "{hit_rate:.4f}"),
        ("hit rate computed from the prompts", "{hit_rate_computed:.4f}"),
    )


def waiting(summary: Summary) -> Iterable[str]:
    yield WAITING_HEAD.format(pairs=summary.setup["pairs"]) + "\n"
    yield device_line(summary) + "\n"
    yield facts(
        summary,
        ("alone, tok/s", "{tokens_per_s_alone:.1f}"),
        ("with 2,000 queued, tok/s", "{tokens_per_s_beside_2000:.1f}"),
        ("ratio per pair", "{ratio:.3f span}"),
        (
            "p99 gap between stream events, alone and with the queue, ms",
            "{gap_p99_ms_alone:.0f}, {gap_p99_ms_beside_2000:.0f}",
        ),
        ("time to queue 2,000 requests, s", "{queue_formed_in_s:.1f}"),
    )


def upkeep(summary: Summary) -> Iterable[str]:
    yield UPKEEP_HEAD.format(pairs=summary.setup["pairs"]) + "\n"
    yield device_line(summary) + "\n"
    yield facts(
        summary,
        ("defaults, tok/s", "{tokens_per_s_default:.1f}"),
        ("without, tok/s", "{tokens_per_s_without:.1f}"),
        ("ratio per pair", "{ratio:.3f span}"),
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
    yield facts(
        summary,
        ("bf16, tok/s", f"{bf16:.1f}"),
        ("int8, tok/s", f"{rounded:.1f}"),
        ("speedup per pair", f"**{ratio:.2f}** ({ratio.least:.2f}-{ratio.most:.2f})"),
        ("limit of int8 at the read rate, tok/s", f"{limit:.1f}"),
        ("share of that limit", f"{rounded / limit:.0%}"),
    )


def int8_perplexity(summary: Summary) -> Iterable[str]:
    change, agreement = (
        summary.row(quantity, case="all", arm="int8") for quantity in ("change", "agreement")
    )
    yield rows(
        (("change in perplexity", f"{change:+.2%}"), ("same argmax token", f"{agreement:.2%}"))
    )


def grammar(summary: Summary) -> Iterable[str]:
    yield GRAMMAR_HEAD.format(pairs=summary.setup["pairs"]) + "\n"
    yield device_line(summary) + "\n"
    row = summary.row("cost")
    cost, least, most = (100 * share for share in (row.middle, row.least, row.most))
    yield facts(
        summary,
        ("without a schema, tok/s", "{tokens_per_s_plain:.1f}"),
        ("with a schema, tok/s", "{tokens_per_s_schema:.1f}"),
        ("cost per pair", f"**{cost:.1f} %** ({least:.1f} to {most:.1f})"),
        ("advancing 16 matchers by one token", "{walks_us:.0f} us"),
        ("of which accepting tokens", "{of_walks_accept_us:.0f} us"),
        ("of which filling masks", "{of_walks_fill_us:.0f} us"),
        ("copying masks into the step plan", "{into_the_plan_us:.0f} us"),
        ("applying masks to logits", "{into_the_logits_us:.0f} us"),
    )
