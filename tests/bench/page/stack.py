"""The sections of all services together: CPU use, streams, bodies, vectors, and a soak test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bench.page.markdown import lines, machine_line, markdown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.bench.summary import Measurement, Summary

ENCODED_BY = ("antiphon", "transformers")
"""The columns of the embeddings."""
PLANNING_HEAD = """
## Planning

CPU time of the batching loop outside the model, in us, with all slots in use: planning a step, and
planning plus committing its sampled tokens. Medians of {steps:,} steps, with the 10th and 90th
percentile in parentheses: [tests/bench/planning.py](../tests/bench/planning.py).
"""
TRANSFER_HEAD = """
## Pages through kv_storage

Blocks of 64 tokens of the 135M shape ({block_mb:.2f} MB each) to a node on the same machine and
back, and as many bytes of raw TCP, in turns: GB/s from the call to the last byte, medians of
{rounds} rounds, with the 10th and 90th percentile in parentheses, and CPU time a GB of both
processes.{full} The target is half of raw TCP:
[tests/bench/transfer.py](../tests/bench/transfer.py).
"""
NODE_FULL = """ The memory of the node is full before they begin, as it is after a while: what is
saved takes the place of what is evicted."""
SERVICES_HEAD = """
## CPU use of the services

In percent of one core, while a worker that computes nothing sends {tokens_per_s:.0f} tokens/s to 16
clients over HTTP. Medians of {rounds} rounds, without the worker:
[tests/bench/__main__.py](../tests/bench/__main__.py).
"""
BODIES_HEAD = """
## Large request bodies

One client posts a large body while another tenant streams {streams} chats. The columns are the p99
of the gaps between events of these streams in ms, without and with the body; windows of each in
turn, {rounds} per body. The difference is the median over pairs and must not exceed {most:g} ms. No
stream ended early, and none was rejected: [tests/bench/bodies.py](../tests/bench/bodies.py).
"""
EMBEDDINGS_HEAD = """
## Embeddings

Texts of {words} words over HTTP, in bodies of 32 texts and in a body each, against transformers in
one process, which tokenizes them and embeds them in batches of 32 sorted by length; both in
bfloat16 on all cores. Texts: {texts}. The columns are texts per second, medians of {rounds} rounds,
each of which embeds all texts once in every way; a ratio is of one round. Every vector is compared:
[tests/bench/embeddings.py](../tests/bench/embeddings.py).
"""
IMAGES_HEAD = """
## Images in chats

{clients} clients send JPEGs that are new to a small LLaVA (a tower of 12 layers of 384, 576 tokens
an image, 4 layers of text, float32), and wait for one token: with one encoder and with two, against
transformers in one process on the same files. Times are in ms, of an image or of a request: to the
first token (median), and, as means, to fetch the image from the gateway, to decode and resize it,
in tower and projector, and to fetch the embedding. Medians of {rounds} rounds. vLLM is not
compared: its LLaVA imports torchvision, whose builds on PyPI work beside
torch's build for CUDA only.
"""
TEXTS_BESIDE_HEAD = """
### Texts beside images

Short texts wait for their only token, in ms, while {clients} other clients send images of
1,024 x 1,024 that are new: with encoders in processes of their own, as everywhere, and with one in
the worker's process, in turn. Each text of {rounds} rounds counts:
[tests/bench/texts_beside_images.py](../tests/bench/texts_beside_images.py).
"""
IMAGE_PARTS = ("fetch", "decode", "tower", "transfer")
SOAK_HEAD = """
## Ten minutes of random load

{requests:,} requests over HTTP and NATS in {minutes:.0f} minutes. Clients abandoned {left:.0%} of
them, and {refused:.0%} were rejected or missed their deadline. The cache is so small that
{retractions:,} requests were retracted. The table shows what remains after the last request, and
the memory growth of each service in the second half: [tests/bench/soak.py](../tests/bench/soak.py).
"""
CROWD_HEAD = """
## Many streams

{streams} concurrent chat streams over HTTP through one gateway. The worker computes nothing: it
sends one token per stream every 20 ms (`steady`), or tokens as fast as the services accept them
(`hasty`). A gap is the time between two events of a stream, as the client sees it; medians of
{rounds} windows of 6 s. Broker, services and clients share the cores:
[tests/bench/crowd](../tests/bench/crowd/__main__.py).
"""
CROWD_PROFILE = """
Where the gateway's CPU time goes, in percent:

"""


def planned(summary: Summary) -> Iterable[str]:
    steps = int(summary.setup["rounds"]) * int(summary.setup["steps"])
    yield PLANNING_HEAD.format(steps=steps) + "\n"
    yield machine_line(summary) + ".\n\n"
    yield markdown(
        ("load", "plan", "plan and commit"),
        lines(summary, "**{plan_us:.0f tenths}**", "{step_us:.0f tenths}"),
    )


def transferred(summary: Summary) -> Iterable[str]:
    block_mb = float(summary.setup["block_bytes"]) / 1e6
    full = NODE_FULL if "node_bytes" in summary.setup else ""
    yield TRANSFER_HEAD.format(block_mb=block_mb, rounds=summary.setup["rounds"], full=full) + "\n"
    yield machine_line(summary) + ".\n\n"
    arms = ("save", "fetch", "raw TCP")
    yield markdown(
        ("", *arms, "save / raw TCP", "fetch / raw TCP", *(f"CPU s/GB, {arm}" for arm in arms)),
        lines(
            summary,
            *(f"{{GB/s {arm}:.2f tenths}}" for arm in arms),
            "**{ratio save:.2f tenths}**",
            "**{ratio fetch:.2f tenths}**",
            *(f"{{cpu_s/GB {arm}:.2f}}" for arm in arms),
        ),
    )


def services(summary: Summary) -> Iterable[str]:
    rate = summary.row("tokens_per_s")
    yield SERVICES_HEAD.format(tokens_per_s=rate.middle, rounds=rate.n or 0) + "\n"
    yield machine_line(summary) + ".\n\n"
    yield markdown(("service", "percent"), lines(summary, "{percent:.1f span}", by="arm"))


def large_bodies(summary: Summary) -> Iterable[str]:
    setup = summary.setup
    yield BODIES_HEAD.format_map(setup | {"most": setup["difference_ms_max"]}) + "\n"
    yield f"{machine_line(summary)}; load average {summary.machine.load:g} at the end.\n\n"
    yield markdown(
        (
            *("body", "MB", "status", "response, ms"),
            *("p99 without", "p99 with", "max with", "difference"),
        ),
        (_body_cells(summary, case) for case in summary.cases()),
    )


def _body_cells(summary: Summary, case: str) -> Sequence[str]:
    def row(quantity: str, arm: str | None = None) -> Measurement:
        return summary.row(quantity, case=case, arm=arm)

    status = row("status")
    return (
        case,
        f"{row('size_bytes').middle / 1e6:.1f}",
        ", ".join(sorted({f"{each:.0f}" for each in status.by_round or (status.middle,)})),
        f"{row('reply_ms'):.0f}",
        f"{row('gap_p99_ms', 'without'):.0f}",
        f"{row('gap_p99_ms', 'with'):.0f}",
        f"{row('gap_max_ms', 'with').most:.0f}",
        f"**{row('difference_ms'):+.0f}**",
    )


def embeddings(summary: Summary) -> Iterable[str]:
    yield EMBEDDINGS_HEAD.format_map(summary.setup) + "\n"
    yield f"{machine_line(summary)}.\n\n"
    yield markdown(
        ("shape", "sent as", "antiphon", "transformers", "ratio"),
        (
            (
                *case.split(", ", 1),
                *(f"{summary.row('texts_s', case=case, arm=arm):.0f}" for arm in ENCODED_BY),
                f"**{summary.row('ratio', case=case, ratio=True):.2f span}**",
            )
            for case in summary.cases()
        ),
    )


def images(summary: Summary) -> Iterable[str]:
    yield IMAGES_HEAD.format_map(summary.setup) + "\n"
    yield f"{machine_line(summary)}.\n\n"
    yield markdown(
        ("images", "served by", "images/s", "transformers", "ratio", "first token", *IMAGE_PARTS),
        (
            (case, arm, *_image_cells(summary, case, arm))
            for case in summary.cases()
            for arm in summary.arms("tower_ms")
            if summary.find("tower_ms", case=case, arm=arm) is not None
        ),
    )


def texts_beside(summary: Summary) -> Iterable[str]:
    yield TEXTS_BESIDE_HEAD.format_map(summary.setup) + "\n"
    yield f"{machine_line(summary)}.\n\n"
    yield markdown(
        ("", "encoder", "p50", "p90", "most"),
        (
            (row.case, row.arm, f"{row:.0f}", f"{row.p90:.0f}", f"{row.most:.0f}")
            for row in summary.rows
        ),
    )


def _image_cells(summary: Summary, case: str, arm: str) -> Iterable[str]:
    yield f"{summary.row('images_s', case=case, arm=arm):.1f span}"
    ratio = summary.find("ratio", case=case, arm=arm, ratio=True)
    theirs = summary.row("images_s", case=case, arm="transformers") if ratio else None
    yield "" if theirs is None else f"{theirs:.1f}"
    yield "" if ratio is None else f"**{ratio:.2f span}**"
    yield f"{summary.row('first_token_ms', case=case, arm=arm):.0f}"
    for part in IMAGE_PARTS:
        yield f"{summary.row(f'{part}_ms', case=case, arm=arm):.1f}"


def soaked(summary: Summary) -> Iterable[str]:
    yield SOAK_HEAD.format_map(
        summary.setup
        | {
            "left": _share(summary, "left"),
            "refused": _share(summary, "503", "overloaded", "deadline"),
        }
    )
    yield f"\n{machine_line(summary)}.\n\n"
    left = (
        f"{name.removeprefix('antiphon_')} {summary.row('left', arm=name):g}"
        for name in summary.arms("left")
    )
    grown = (
        f"{name} {summary.row('kib_per_minute', arm=name).middle / 1024:+.2f}"
        for name in summary.arms("kib_per_minute")
    )
    yield markdown(
        ("", ""),
        (
            ("remaining", ", ".join(left)),
            ("memory growth, MiB/min", ", ".join(grown)),
            ("failures", ", ".join(summary.notes) or "none"),
        ),
    )


def _share(summary: Summary, *ends: str) -> float:
    """Return the share of requests with one of these outcomes."""
    outcomes = (
        (row.case.partition(": ")[2], row.middle)
        for row in summary.rows
        if row.quantity == "requests"
    )
    count = sum(n for way, n in outcomes if way.startswith(ends))
    return count / int(summary.setup["requests"])


def crowd(summary: Summary) -> Iterable[str]:
    yield CROWD_HEAD.format(**summary.setup) + "\n"
    yield f"{machine_line(summary)}.\n\n"
    processes = summary.arms("percent_of_core")
    yield markdown(
        ("worker", "events/s", "gap p50, ms", "gap p99, ms", "gateway, us/event", "% of a core"),
        lines(
            summary,
            *("{events_per_s:.0f}", "{gap_p50_ms:.1f}", "{gap_p99_ms:.1f}"),
            "{gateway_us_per_event:.1f}",
            ", ".join(f"{name} {{percent_of_core {name}:.0f}}" for name in processes),
        ),
    )
    yield CROWD_PROFILE
    cases = summary.cases()
    yield markdown(
        ("part", *cases),
        (
            (part, *(f"{_gateway_share(summary, case, part):.1f}" for case in cases))
            for part in sorted(summary.arms("percent_of_gateway"))
        ),
    )


def _gateway_share(summary: Summary, case: str, part: str) -> float:
    row = summary.find("percent_of_gateway", case=case, arm=part)
    return 0.0 if row is None else row.middle
