"""Speedup of the radix cache: 32 prompts that share 768 tokens, with the cache and without.

Expected: without, 32 x 800 tokens are computed; with it, 768 once and 32 of each: 14 times fewer.
The cached tokens follow from the prompts, and the server's count must be equal to that.

    python -m tests.bench.serving.radix
"""

from __future__ import annotations

import asyncio
import os
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from tests.bench.figures import machine
from tests.bench.models import CACHE, LLAMA_135M, Model, made
from tests.bench.peers.antiphon import Antiphon
from tests.bench.peers.quiet import work
from tests.bench.peers.report import config_digest
from tests.bench.serving.arrival import ClosedLoop
from tests.bench.serving.datasets import SharedPrefix, Vocabulary
from tests.bench.serving.device import measure_device
from tests.bench.serving.load import play
from tests.bench.serving.metrics import measure
from tests.bench.serving.nats import WholeNatsTarget
from tests.bench.serving.report import Report, Run, summarize_facts, table
from tests.bench.summary import RESULTS, Summary, write_results
from tests.system.stack import Stack, serving

from antiphon.client import Client

if TYPE_CHECKING:
    from collections.abc import Sequence

REQUESTS = 32
DATASET = SharedPrefix(768, 32, 1)
PAIRS = 5
PAGE_TOKENS = 16
SETTINGS = {"cached": (), "not cached": ("--disable-radix-cache",)}


def main() -> None:
    """Measure in pairs, print, write."""
    model = made(LLAMA_135M)
    antiphon = Antiphon(CACHE, os.cpu_count() or 1)
    runs: list[Run] = []
    for pair in range(PAIRS):
        for name, arguments in SETTINGS.items():
            with serving(*antiphon.arguments(model), *arguments) as stack:
                runs.append(asyncio.run(_run(f"{name} {pair}", pair, model, stack)))
    report = Report(
        machine=machine(),
        device=measure_device(),
        model=model.name,
        config_digest=config_digest(antiphon, model),
        runs=tuple(runs),
        facts=facts(runs),
    )
    Console(width=140).print(table(runs), report.facts)
    write_results(RESULTS / "radix.json", report, summarize(report))


def facts(runs: Sequence[Run]) -> dict[str, float]:
    """Reduce to what was promised: how much faster, and that the hit rate is the computed one."""
    pairs = by_round(runs)
    plain = [run.metrics for run in runs if run.name.startswith("not cached")]
    prompt = plain[0].prompt_tokens
    return {
        "times_faster": median(pairs["times_faster"]),
        "hit_rate": median(pairs["hit_rate"]),
        "hit_rate_computed": (REQUESTS - 1) * shared_tokens() / prompt,
        "hit_rate_without_cache": max((run.cached_tokens or 0) / prompt for run in plain),
    }


def by_round(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Return the values of each pair of runs."""
    cached, plain = (
        [run.metrics for run in runs if run.name.rpartition(" ")[0] == name] for name in SETTINGS
    )
    return {
        "times_faster": [b.duration_s / a.duration_s for a, b in zip(cached, plain, strict=True)],
        "hit_rate": [(run.cached_tokens or 0) / run.prompt_tokens for run in cached],
    }


def summarize(report: Report) -> Summary:
    """Reduce a run to the rows of its page section."""
    return summarize_facts("radix", report, by_round(report.runs))


def shared_tokens() -> int:
    """Tokens that a second prompt has in common with the first: whole pages of them."""
    return DATASET.prefix_tokens // PAGE_TOKENS * PAGE_TOKENS


async def _run(name: str, seed: int, model: Model, stack: Stack) -> Run:
    words = Vocabulary(model.folder)
    async with WholeNatsTarget(Client(stack.nats_url), stack.model) as target:
        warm_up = SharedPrefix(64, 32, 1).scripts(words, REQUESTS, seed + 1_000_000)
        await play(warm_up, ClosedLoop(REQUESTS), target)
        before = work([os.getpid(), stack.process.pid])
        timelines = await play(DATASET.scripts(words, REQUESTS, seed), ClosedLoop(REQUESTS), target)
        others = work([os.getpid(), stack.process.pid]).others_since(before)
    return Run(
        name=name,
        dataset=str(DATASET),
        arrival=f"closed:{REQUESTS}",
        over="nats",
        seed=seed,
        metrics=measure(timelines, words.tokens),
        others=others,
    )


if __name__ == "__main__":
    main()
