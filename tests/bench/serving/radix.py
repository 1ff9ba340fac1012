"""Speedup of the radix cache: 32 prompts that share 768 tokens, with the cache and without.

Expected: without, 32 x 800 tokens are computed; with it, 768 once and 32 of each: 14 times fewer.
The cached tokens follow from the prompts, and the server's count must be equal to that.

    python -m tests.bench.serving.radix
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from tests.bench.models import CACHE, LLAMA_135M, Model, made
from tests.bench.peers.servers import Antiphon
from tests.bench.serving.client import NatsTarget
from tests.bench.serving.load import ClosedLoop, SharedPrefix, Vocabulary
from tests.bench.serving.report import Load, Run, by_arm, summarize_pairs
from tests.bench.summary import RESULTS, report
from tests.system.stack import Stack, serving

from antiphon.client import Client

if TYPE_CHECKING:
    from collections.abc import Sequence

REQUESTS = 32
DATASET = SharedPrefix(768, 32, 1)
LOAD, WARM_UP = (
    Load(dataset, REQUESTS, ClosedLoop(REQUESTS), over="nats")
    for dataset in (DATASET, SharedPrefix(64, 32, 1))
)
PAIRS = 5
PAGE_TOKENS = 16
SETTINGS = {"cached": (), "not cached": ("--disable-radix-cache",)}


def main() -> None:
    model = made(LLAMA_135M)
    antiphon = Antiphon(CACHE, os.cpu_count() or 1)
    runs: list[Run] = []
    for pair in range(PAIRS):
        for name, arguments in SETTINGS.items():
            with serving(*antiphon.arguments(model), *arguments) as stack:
                runs.append(asyncio.run(_run(f"{name} {pair}", pair, model, stack)))
    summary = summarize_pairs(
        "radix", runs, by_round(runs), counted(runs), peer=antiphon, model=model
    )
    report(summary, RESULTS / "radix.json", runs)


def counted(runs: Sequence[Run]) -> dict[str, float]:
    """Return the hit rate that follows from the prompts, and the one without the cache."""
    _, plain = by_arm(runs, SETTINGS)
    prompt = plain[0].prompt_tokens
    # What a second prompt has in common with the first: whole pages.
    shared = DATASET.prefix_tokens // PAGE_TOKENS * PAGE_TOKENS
    return {
        "hit_rate_computed": (REQUESTS - 1) * shared / prompt,
        "hit_rate_without_cache": max((run.cached_tokens or 0) / prompt for run in plain),
    }


def by_round(runs: Sequence[Run]) -> dict[str, list[float]]:
    cached, plain = by_arm(runs, SETTINGS)
    return {
        "times_faster": [b.duration_s / a.duration_s for a, b in zip(cached, plain, strict=True)],
        "hit_rate": [(run.cached_tokens or 0) / run.prompt_tokens for run in cached],
    }


async def _run(name: str, seed: int, model: Model, stack: Stack) -> Run:
    words = Vocabulary(model.folder)
    async with NatsTarget(Client(stack.nats_url), stack.model, whole=True) as target:
        await WARM_UP.run("warm-up", seed + 1_000_000, target, words)
        return await LOAD.run(name, seed, target, words, stack.process.pid)


if __name__ == "__main__":
    main()
