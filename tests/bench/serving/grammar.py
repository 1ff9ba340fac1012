"""Cost of a grammar at batch 16: the same load with a JSON schema and without, in turn.

Both sample, and both produce equally many tokens: the schema is a list too long to complete. Random
weights write every kind of JSON (numbers, names and escapes), and so meet every kind of mask. On a
CPU nothing overlaps with the forward pass, so all of the cost shows; the target is less than 5 %.

Expected before measuring: a step of 16 rows takes 16 ms. Accepting a token takes 10 us, filling a
mask 30 us, so 0.65 ms for 16 rows; applying masks to logits 0.1 ms: 4.5 %.

    python -m tests.bench.serving.grammar
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING

from tests.bench.models import CACHE, LLAMA_135M, Model, made
from tests.bench.peers.antiphon import Antiphon
from tests.bench.peers.process import running
from tests.bench.serving import guiding
from tests.bench.serving.client import HttpTarget
from tests.bench.serving.datasets import RandomLengths, Vocabulary
from tests.bench.serving.load import ClosedLoop
from tests.bench.serving.report import Load, Run, summarize_pairs
from tests.bench.summary import RESULTS, report

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.bench.peers.process import Server

CLIENTS = 16
REQUESTS = 32
PAIRS = 6
LOAD = Load(RandomLengths(128, 128), REQUESTS, ClosedLoop(CLIENTS))
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "email": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "height": {"type": "number"},
        "colour": {"enum": ["red", "green", "blue", None]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "home": {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
                    "required": ["street", "number"],
                },
            ]
        },
    },
    "required": ["name", "email", "age", "height", "colour", "tags", "home"],
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 400}
"""More items than there are tokens."""
CHANCE = {"temperature": 1.0}
ARMS: Mapping[str, Mapping[str, object]] = {
    "plain": CHANCE,
    "schema": {**CHANCE, "json_schema": json.dumps(SCHEMA)},
}


def main() -> None:
    model = made(LLAMA_135M)
    antiphon = Antiphon(CACHE, os.cpu_count() or 1)
    with running(antiphon, model) as server:
        runs = asyncio.run(_pairs(model, server))
    parts = guiding.measure(model.folder, SCHEMA, CLIENTS)
    summary = summarize_pairs("grammar", runs, by_round(runs), parts, peer=antiphon, model=model)
    report(summary, RESULTS / "grammar.json", runs)


def by_round(runs: Sequence[Run]) -> dict[str, list[float]]:
    plain, schema = (
        [run.metrics.output_tokens_per_s for run in runs if run.name.split()[0] == name]
        for name in ARMS
    )
    return {
        "tokens_per_s_plain": plain,
        "tokens_per_s_schema": schema,
        "cost": [1 - with_it / without for without, with_it in zip(plain, schema, strict=True)],
    }


async def _pairs(model: Model, server: Server) -> list[Run]:
    words = Vocabulary(model.folder)
    runs: list[Run] = []
    for more in ARMS.values():
        await _play(words, server, more, 1_000_000)  # warms up, and compiles the schema
    for pair in range(PAIRS):
        # The second run finds the machine as the first one left it: alternate.
        arms = list(ARMS.items())
        for name, more in arms if pair % 2 == 0 else reversed(arms):
            runs.append(await _play(words, server, more, pair, f"{name} {pair}"))
    return runs


async def _play(
    words: Vocabulary, server: Server, more: Mapping[str, object], seed: int, name: str = "warm-up"
) -> Run:
    async with HttpTarget(server.url, server.model, more=more) as target:
        run = await LOAD.run(name, seed, target, words, server.pid)
    expected = REQUESTS * LOAD.dataset.output_tokens
    assert not run.metrics.failed, f"{run.metrics.failed} requests failed"
    assert run.metrics.output_tokens == expected, "unexpected lengths"
    return run


if __name__ == "__main__":
    main()
