"""Where a grammar's time goes in a step: following the tokens, masks, and masks into the logits.

In this process and alone, with the parts that the worker is made of, by the same tokens.

    python -m tests.bench.serving.guiding FOLDER ROWS < schema
"""

from __future__ import annotations

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
from tests.bench.models import END_ID

from antiphon.model_card.vocabulary import read_vocabulary
from antiphon.wire.sampling import Grammar, GrammarKind, SamplingParams

if TYPE_CHECKING:
    from antiphon.model_worker.grammar.backend import CompiledGrammar
    from antiphon.model_worker.grammar.matcher import GrammarMatcher

STEPS = 400
WARM_UP = 50


def measure(folder: Path, schema: object, rows: int) -> dict[str, float]:
    """Measure in a process of its own, so that the load generator stays free of torch.

    Returns:
        Microseconds a step of so many rows, by part.
    """
    command = [sys.executable, "-m", __name__, str(folder), str(rows)]
    text = msgspec.json.encode(schema)
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=dict[str, float])


def parts(compiled: CompiledGrammar, vocab_size: int, rows: int) -> dict[str, float]:
    """Follow random answers, `rows` at once, and time what each step does for them."""
    # The parent process imports this file for `measure` alone.
    import torch  # noqa: PLC0415

    from antiphon.kernels import ops  # noqa: PLC0415
    from antiphon.kernels.op import DeviceCapability  # noqa: PLC0415
    from antiphon.model_worker.batching.logits import LogitsProcessors  # noqa: PLC0415
    from antiphon.model_worker.grammar.executor import MatcherTask, ThreadedMatcherExecutor  # noqa: PLC0415
    from antiphon.model_worker.grammar.matcher import GrammarMatcher  # noqa: PLC0415

    took: dict[str, list[float]] = defaultdict(list)

    def note(name: str, began_s: float) -> float:
        """Record a part that has just ended; return the time, at which the next one begins."""
        now = time.perf_counter()
        took[name].append(now - began_s)
        return now

    dice, walker = np.random.default_rng(0), ThreadedMatcherExecutor(patience_s=1.0)
    steering, chosen = LogitsProcessors(rows, vocab_size), ops.select(DeviceCapability("cpu"))
    guides = [
        GrammarMatcher(compiled.start(()), vocab_size, compiled.eos_ids(())) for _ in range(rows)
    ]
    bare = [compiled.start(()) for _ in range(rows)]
    words = np.zeros((rows, -(-vocab_size // 32)), np.int32)
    requests = [_request(slot, guide) for slot, guide in enumerate(guides)]
    for request in requests:
        steering.fill(request)
    logits = torch.randn(rows, vocab_size)
    drawing = [_row(request) for request in requests]
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
        masks, masked = steering.masks(drawing)
        assert masks is not None
        assert masked is not None
        began_s = note("into_the_plan_us", began_s)
        chosen.mask(logits, torch.as_tensor(masked.astype(np.int64)), torch.as_tensor(masks))
        torch.isneginf(logits.amax(dim=-1)).numpy()
        note("into_the_logits_us", began_s)
        logits.zero_()
    return {name: 1e6 * median(each[WARM_UP:]) for name, each in took.items()}


def _request(slot: int, guide: GrammarMatcher) -> Any:
    """As much of a running request as masks are made from."""
    state = SimpleNamespace(sampling=SamplingParams(max_new_tokens=1))
    return SimpleNamespace(slot=slot, guide=guide, filter=None, state=state)


def _row(request: Any) -> Any:
    """As much of a row that draws."""
    return SimpleNamespace(draws=True, request=request)


def _draw(guide: GrammarMatcher, vocab_size: int, dice: np.random.Generator) -> int:
    """Any token that may come, each as likely as any other."""
    assert guide.mask is not None
    bits = np.unpackbits(guide.mask.view(np.uint8), bitorder="little")[:vocab_size]
    return int(dice.choice(np.flatnonzero(bits)))


def main() -> None:
    import torch  # noqa: PLC0415

    from antiphon.config.worker import GrammarConfig  # noqa: PLC0415
    from antiphon.model_worker.grammar.backend import open_compiler  # noqa: PLC0415
    from antiphon.model_worker.grammar.source import source_of  # noqa: PLC0415

    torch.set_num_threads(os.cpu_count() or 1)
    folder, rows, config = Path(sys.argv[1]), int(sys.argv[2]), GrammarConfig()
    size = len(read_vocabulary(folder).tokens)
    compiler = open_compiler(folder, size, frozenset({END_ID}), config)
    form = Grammar(kind=GrammarKind.JSON_SCHEMA, text=sys.stdin.read())
    compiled = compiler.compile(source_of(form, config.whitespace_max))
    print(msgspec.json.encode(parts(compiled, size, rows)).decode())


if __name__ == "__main__":
    main()
