"""Whole steps of a runner: all layers as one call, layer by layer, and on torch.

Each round reads a buffer larger than any CPU cache, then runs every variant once, so that other
processes disturb all of them alike; the first variant changes each round. `limit` is the time to
read weights and KV cache at that rate. The first variant is deterministic mode: the CPU's own
kernels are batch-invariant in any mode, so its cost is the first row against the second.

    python -m tests.bench.kernels.steps --shape llama-135m --json tests/bench/results/steps.json
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tests.bench.figures import figure, machine
from tests.bench.kernels.step_report import DEFAULT, DETERMINISTIC, Case, Report, Result, summarize
from tests.bench.models import SHAPES, VOCABULARY, Shape, made
from tests.bench.summary import write_results
from tests.support.models import load

from antiphon.kernels.cpu import extension
from antiphon.kernels.op import REGISTRY
from antiphon.model_worker.batching.plan import SamplingColumns, StepPlan
from antiphon.model_worker.runner.model_runner import ModelRunner
from antiphon.model_worker.runner.pools import cache_groups

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE_TOKENS = 16
SWEEP_BYTES = 1 << 28
CASE_S = 20.0
"""About how long one case is measured."""


CASES = (Case(1, 1, 256), Case(16, 1, 256), Case(64, 1, 256), Case(1, 1024, 1024))


@dataclass
class Way:
    """A runner that measures the time of its decoder."""

    runner: ModelRunner
    decoder_s: float = 0.0
    layers_s: float = 0.0

    def __post_init__(self) -> None:
        decoder = self.runner._model.decoder
        for name in ("forward", "logits"):
            setattr(decoder, name, self._timed(getattr(decoder, name), layers=name == "forward"))
        stack = self.runner._contexts._stack
        if stack is not None:
            setattr(stack, "score", self._timed(stack.score, layers=True))  # noqa: B010  # as above

    def step(self, plan: StepPlan) -> tuple[float, float, float]:
        """Run a plan: seconds of the step, of its layers, and beside layers and head.

        Where all is one call from ids to logits, the layers are all of it.
        """
        self.decoder_s = self.layers_s = 0.0
        self.runner._step = None
        start = time.perf_counter()
        self.runner.run(plan)
        whole = time.perf_counter() - start
        return whole, self.layers_s, whole - self.decoder_s

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
        DETERMINISTIC: ("packed", {"deterministic": True}),
        DEFAULT: ("packed", {}),
        "layer by layer": ("packed", {"fused": False}),
        "torch": ("plain", {"forced": dict.fromkeys(REGISTRY, "torch")}),
    }
    found: dict[str, Way] = {}
    for name, (linear, said) in options.items():
        model = load(made(shape).folder, dtype="bfloat16", linear=linear)
        groups = cache_groups(model.spec, model.build, page_tokens=PAGE_TOKENS, pages=pages)
        found[name] = Way(ModelRunner(model, groups, **said))  # pyright: ignore[reportArgumentType]
    return found


def a_plan(case: Case) -> StepPlan:
    """The step of a case, greedy; its pages lie in no order."""
    random = np.random.default_rng(0)
    each = -(-case.kv // PAGE_TOKENS)
    table = random.permutation(case.rows * each).astype(np.int32).reshape(case.rows, each)
    every = np.ones(case.rows, np.int32)
    ends = np.cumsum(every * case.new, dtype=np.int32)
    positions = np.tile(np.arange(case.kv - case.new, case.kv, dtype=np.int32), case.rows)
    return StepPlan(
        step=1,
        slot=np.arange(case.rows, dtype=np.int32),
        query_start=ends - case.new,
        query_len=every * case.new,
        kv_len=every * case.kv,
        adapter=-every,
        tokens=random.integers(0, VOCABULARY, case.rows * case.new).astype(np.int32),
        positions=positions[np.newaxis],
        logit_tokens=ends - 1,
        sampling=SamplingColumns(
            temperature=np.zeros(case.rows, np.float32),
            top_p=np.ones(case.rows, np.float32),
            min_p=np.zeros(case.rows, np.float32),
            top_k=np.zeros(case.rows, np.int32),
            seed=np.zeros(case.rows, np.int64),
            choice=np.zeros(case.rows, np.int32),
        ),
        page_tables=(table,),
    )


def measure(shape: Shape, cases: tuple[Case, ...]) -> Report:
    """Measure every way of every case."""
    pages = max(case.rows * -(-case.kv // PAGE_TOKENS) for case in cases)
    found = ways(shape, pages)
    sweep = torch.ones(SWEEP_BYTES // 8, dtype=torch.int64)
    results: list[Result] = []
    for case in cases:
        plan = a_plan(case)
        taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in found}
        reads: list[float] = []
        began = time.perf_counter()
        while time.perf_counter() - began < CASE_S or len(reads) < 6:
            start = time.perf_counter()
            sweep.sum()
            reads.append(time.perf_counter() - start)
            # The first variant finds nothing of the runner in the CPU caches, so they alternate.
            first = len(reads) % len(found)
            for name in (*list(found)[first:], *list(found)[:first]):
                taken[name].append(found[name].step(plan))
        read_s = figure(reads).p50 / SWEEP_BYTES
        read = 2 * shape.weights_count + case.rows * case.kv * shape.kv_bytes
        for name, times in taken.items():
            step, layers, beside = (
                figure([1e3 * one for one in column]) for column in zip(*times[1:], strict=True)
            )
            results.append(Result(case, name, step, layers, beside, round(read * read_s * 1e3, 2)))
    return Report(machine(), extension.load().isa(), torch.get_num_threads(), shape.name, results)


def show(report: Report) -> Table:
    """Lay out the results."""
    table = Table(title=f"{report.shape}, {report.isa}, {report.threads} threads, ms")
    for column in ("rows x new of kv", "way", "step", "layers", "beside", "limit of reads"):
        table.add_column(column, justify="right")
    for one in report.results:
        table.add_row(
            f"{one.case.rows} x {one.case.new} of {one.case.kv}",
            one.way,
            f"{one.step.p50:.2f} ({one.step.p10:.2f}-{one.step.p90:.2f})",
            f"{one.layers.p50:.2f}",
            f"{one.beside.p50:.2f}",
            f"{one.limit:.2f}",
            end_section=one.way == "torch",
        )
    return table


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-135m")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    report = measure(SHAPES[arguments.shape], CASES)
    Console(width=120).print(show(report))
    if arguments.json:
        write_results(arguments.json, report, summarize(report))


if __name__ == "__main__":
    main()
