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
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from tests.bench.models import CACHE, END_ID, LLAMA_135M, Model, made
from tests.bench.peers.peer import Server, running
from tests.bench.peers.servers import Antiphon
from tests.bench.serving.client import HttpTarget
from tests.bench.serving.load import ClosedLoop, RandomLengths, Vocabulary
from tests.bench.serving.report import Load, Run, by_arm, summarize_pairs
from tests.bench.summary import RESULTS, report

from antiphon.model_card.vocabulary import read_vocabulary
from antiphon.wire.sampling import Grammar, GrammarKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from antiphon.model_worker.grammar.backend import CompiledGrammar
    from antiphon.model_worker.grammar.matcher import GrammarMatcher

CLIENTS = 16
REQUESTS = 32
PAIRS = 6
STEPS, WARM_UP = 400, 50
"""Of measuring the parts of a step, in a process of its own."""
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
    if sys.argv[1:]:  # the process of `measured_parts`
        _print_parts(Path(sys.argv[1]))
        return
    model = made(LLAMA_135M)
    antiphon = Antiphon(CACHE, os.cpu_count() or 1)
    with running(antiphon, model) as server:
        runs = asyncio.run(_pairs(model, server))
    parts = measured_parts(model.folder)
    summary = summarize_pairs("grammar", runs, by_round(runs), parts, peer=antiphon, model=model)
    report(summary, RESULTS / "grammar.json", runs)


def by_round(runs: Sequence[Run]) -> dict[str, list[float]]:
    plain, schema = (
        [each.output_tokens_per_s for each in metrics] for metrics in by_arm(runs, ARMS)
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


def measured_parts(folder: Path) -> dict[str, float]:
    """Return microseconds a step of so many rows as there are clients, by part.

    Measured in a process of its own, so that the load generator stays free of torch.
    """
    command = [sys.executable, "-m", "tests.bench.serving.grammar", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=dict[str, float])


def parts(compiled: CompiledGrammar, vocab_size: int, rows: int = CLIENTS) -> dict[str, float]:
    """Follow random answers, `rows` at once, and time what each step does for them."""
    import torch  # noqa: PLC0415 the parent process imports this file without torch

    from antiphon.kernels import ops  # noqa: PLC0415
    from antiphon.kernels.op import DeviceCapability  # noqa: PLC0415
    from antiphon.model_worker.batching.logits import LogitsProcessors  # noqa: PLC0415
    from antiphon.model_worker.batching.rows import SlotSet, StepRows  # noqa: PLC0415
    from antiphon.model_worker.grammar.executor import MatcherExecutor, MatcherTask  # noqa: PLC0415
    from antiphon.model_worker.grammar.matcher import GrammarMatcher  # noqa: PLC0415

    took: dict[str, list[float]] = defaultdict(list)

    def note(name: str, began_s: float) -> float:
        """Record a part that has just ended; return the time, at which the next one begins."""
        now = time.perf_counter()
        took[name].append(now - began_s)
        return now

    dice, walker = np.random.default_rng(0), MatcherExecutor(patience_s=1.0)
    chosen = ops.select(DeviceCapability("cpu"))
    guides = [
        GrammarMatcher(compiled.start(()), vocab_size, compiled.eos_ids(())) for _ in range(rows)
    ]
    bare = [compiled.start(()) for _ in range(rows)]
    words = np.zeros((rows, -(-vocab_size // 32)), np.int32)
    running: dict[int, Any] = {slot: _request(slot, guide) for slot, guide in enumerate(guides)}
    steering = LogitsProcessors(rows, vocab_size, running)
    for request in running.values():
        steering.fill(request)
    none = np.zeros(rows, np.int64)
    drawing = StepRows(
        slots=SlotSet.of(range(rows)),
        starts=none,
        ends=none + 1,
        draws=np.ones(rows, np.bool_),
        generations=none,
        decodes=rows,
    )
    logits = torch.randn(rows, vocab_size)
    for _ in range(WARM_UP + STEPS):
        drawn = [_draw(guide, vocab_size, dice) for guide in guides]
        began_s = time.perf_counter()
        walks = [MatcherTask(guide, [token]) for guide, token in zip(guides, drawn, strict=True)]
        walker.submit(walks)
        note("walks_us", began_s)
        assert all(walk.done and walk.finishes == [None] for walk in walks), "the schema ends"
        began_s = time.perf_counter()
        for state, token in zip(bare, drawn, strict=True):
            state.accept(token)
        began_s = note("of_walks_accept_us", began_s)
        for state, row in zip(bare, words, strict=True):
            state.fill(row)
        began_s = note("of_walks_fill_us", began_s)
        part = steering.part(drawing, np.ones(rows, np.bool_), none)
        masks, masked = part.token_masks, part.token_mask_logits
        assert masks is not None
        assert masked is not None
        began_s = note("into_the_plan_us", began_s)
        chosen.mask(logits, torch.as_tensor(masked.astype(np.int64)), torch.as_tensor(masks))
        torch.isneginf(logits.amax(dim=-1)).numpy()
        note("into_the_logits_us", began_s)
        logits.zero_()
    return {name: 1e6 * median(each[WARM_UP:]) for name, each in took.items()}


def _request(slot: int, guide: GrammarMatcher) -> Any:
    """As much of a request as masks are made from."""
    state = SimpleNamespace(sampling=SamplingParams(max_new_tokens=1))
    return SimpleNamespace(slot=slot, matcher=guide, filter=None, state=state)


def _draw(guide: GrammarMatcher, vocab_size: int, dice: np.random.Generator) -> int:
    """Any token that may come, each as likely as any other."""
    assert guide.masks[0] is not None
    bits = np.unpackbits(guide.masks[0].view(np.uint8), bitorder="little")[:vocab_size]
    return int(dice.choice(np.flatnonzero(bits)))


def _print_parts(folder: Path) -> None:
    import torch  # noqa: PLC0415

    from antiphon.config.worker import GrammarConfig  # noqa: PLC0415
    from antiphon.model_worker.grammar.backend import open_compiler  # noqa: PLC0415
    from antiphon.model_worker.grammar.source import source_of  # noqa: PLC0415

    torch.set_num_threads(os.cpu_count() or 1)
    config = GrammarConfig()
    size = len(read_vocabulary(folder).tokens)
    compiler = open_compiler(folder, size, frozenset({END_ID}), config)
    form = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(SCHEMA))
    compiled = compiler.compile(source_of(form, config.whitespace_max))
    print(msgspec.json.encode(parts(compiled, size)).decode())


if __name__ == "__main__":
    main()
