"""Whole steps of a runner: all layers as one call, layer by layer, and on torch.

`limit` is the time to read weights and KV cache at the rate of plain reads. The first variant is
deterministic mode: the CPU's own kernels are batch-invariant in any mode, so its cost is the first
row against the second.

    python -m tests.bench.kernels.steps --shape llama-135m --json tests/bench/results/steps.json
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from tests.bench.kernels.rounds import Rounds, arguments, read_gb_s, run, setup
from tests.bench.models import SHAPES, Shape, made
from tests.bench.summary import Measurement, Summary, here, measured, single
from tests.support.models import load
from tests.support.worker import decode_plan

from antiphon.kernels.op import REGISTRY
from antiphon.model_worker.runner.model_runner import ModelRunner
from antiphon.model_worker.runner.pools import cache_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from antiphon.model_worker.batching.plan import StepPlan

PAGE_TOKENS = 64
CASE_S = 20.0
"""About how long one case is measured."""


@dataclass(frozen=True)
class Case:
    """A step: so many rows, each of so many new tokens, up to so many in all."""

    rows: int
    new: int
    kv: int


CASES = (Case(1, 1, 256), Case(16, 1, 256), Case(64, 1, 256), Case(1, 1024, 1024))


@dataclass
class Way:
    """A runner that measures the time of its decoder.

    Attributes:
        layers_ms: Of each step: all layers, from the embedding to the final norm; where all is one
            call from ids to logits, all of it.
        beside_ms: All but layers and head: Python, plan, checks, sampling.
    """

    runner: ModelRunner
    layers_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)
    decoder_s: float = 0.0
    layers_s: float = 0.0

    def __post_init__(self) -> None:
        decoder = self.runner._model.decoder
        for name in ("forward", "logits"):
            setattr(decoder, name, self._timed(getattr(decoder, name), layers=name == "forward"))
        stack = self.runner._contexts._stack
        if stack is not None:
            setattr(stack, "score", self._timed(stack.score, layers=True))  # noqa: B010  # as above

    def step(self, plan: StepPlan) -> None:
        self.decoder_s = self.layers_s = 0.0
        self.runner._step = None
        start = time.perf_counter()
        self.runner.run(plan)
        whole = time.perf_counter() - start
        self.layers_ms.append(1e3 * self.layers_s)
        self.beside_ms.append(1e3 * (whole - self.decoder_s))

    def _timed(self, call: Callable[..., object], *, layers: bool) -> Callable[..., object]:
        def timed(*arguments: object, **named: object) -> object:
            start = time.perf_counter()
            result = call(*arguments, **named)
            taken = time.perf_counter() - start
            self.decoder_s += taken
            self.layers_s += taken if layers else 0.0
            return result

        return timed


def ways(shape: Shape, pages: int) -> dict[str, Way]:
    """The runners, on the same weights."""
    options: dict[str, tuple[str, dict[str, object]]] = {
        "deterministic": ("packed", {"deterministic": True}),
        "default": ("packed", {}),
        "layer by layer": ("packed", {"fused": False}),
        "torch": ("plain", {"forced": dict.fromkeys(REGISTRY, "torch")}),
    }
    found: dict[str, Way] = {}
    for name, (linear, more) in options.items():
        model = load(made(shape).folder, dtype="bfloat16", linear=linear)
        groups = cache_groups(model.spec, model.build, page_tokens=PAGE_TOKENS, pages=pages)
        found[name] = Way(ModelRunner(model, groups, **more))  # pyright: ignore[reportArgumentType]
    return found


def measure(shape: Shape) -> Summary:
    pages = max(case.rows * -(-case.kv // PAGE_TOKENS) for case in CASES)
    found, rounds = ways(shape, pages), Rounds()
    rows = (row for case in CASES for row in _rows(shape, case, found, rounds))
    return here("steps", {"shape": shape.name, **setup()}, rows)


def _rows(shape: Shape, case: Case, found: dict[str, Way], rounds: Rounds) -> Iterable[Measurement]:
    plan = decode_plan(case.rows, case.new, case.kv, PAGE_TOKENS)
    for way in found.values():
        way.layers_ms.clear()
        way.beside_ms.clear()
    times = rounds.alternate({name: partial(way.step, plan) for name, way in found.items()}, CASE_S)
    read_bytes = 2 * shape.read_count(case.rows * case.new) + case.rows * case.kv * shape.kv_bytes
    limit_ms = round(read_bytes / read_gb_s(times) / 1e6, 2)
    title = f"{case.rows} x {case.new} of {case.kv}"
    for name, way in found.items():
        yield measured("step_ms", times[name], case=title, arm=name)
        yield measured("layers_ms", way.layers_ms[1:], case=title, arm=name)
        yield measured("beside_ms", way.beside_ms[1:], case=title, arm=name)
        yield single("limit_ms", limit_ms, case=title, arm=name)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-135m")
    run(parser, lambda given: measure(SHAPES[given.shape]))


if __name__ == "__main__":
    main()
