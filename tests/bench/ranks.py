"""Steps of two ranks of one thread each, beside those of one rank of two threads.

    python -m tests.bench.ranks

The shape is that of a 135M model with 8 heads, which two ranks can share, instead of 9. Expected of
a decode on two cores: 10 ms of kernels on one rank, half of that on each of two, and 61 sums and a
gather, which take at least 0.1 ms each over TCP: ranks are slower here, and what they cost is the
point.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace
from tests.bench.models import LLAMA_135M, made
from tests.models.rank import Ranks
from tests.support.models import load
from tests.support.worker import decode_plan

from antiphon.model_worker.runner.model_runner import ModelRunner
from antiphon.model_worker.runner.pools import cache_groups

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.batching.plan import StepPlan

SHAPE = replace(LLAMA_135M, name="llama-115m", hidden=512, heads=8, kv_heads=2, vocabulary=49_152)
PAGE_TOKENS = 16
CASES = {"decode, 1 row": (1, 1, 256), "decode, 16 rows": (16, 1, 256), "prefill": (1, 512, 512)}
PAGES = 16 * 256 // PAGE_TOKENS
ROUNDS = 15
OPEN: dict[str, Any] = {"dtype": "bfloat16", "linear": "packed"}


@dataclass
class Collectives:
    """Time that rank 0 spends in collectives of layers, with its waits for the other rank."""

    seconds: float = 0.0
    steps: list[float] = field(default_factory=list[float])

    def timed(self, call: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        def collective(x: torch.Tensor) -> torch.Tensor:
            began = time.perf_counter()
            result = call(x)
            self.seconds += time.perf_counter() - began
            return result

        return collective


def one_rank(*, fused: bool) -> Callable[[StepPlan], object]:
    model = load(made(SHAPE).folder, **OPEN)
    groups = cache_groups(model.spec, model.build, page_tokens=PAGE_TOKENS, pages=PAGES)
    runner = ModelRunner(model, groups, fused=fused)

    def step(plan: StepPlan) -> None:
        runner._step = None
        runner.run(plan)

    return step


def main() -> None:
    pair = Ranks(tp=2)
    tensor = pair.groups.tensor
    collectives = Collectives()
    for name in ("all_reduce", "all_gather"):
        setattr(tensor, name, collectives.timed(getattr(tensor, name)))
    fused, by_layer = one_rank(fused=True), one_rank(fused=False)
    values = {**OPEN, "page_tokens": PAGE_TOKENS, "pages": PAGES}
    with pair.opened(made(SHAPE).folder, **values) as (_, lead):
        number = 0
        for case, shape in CASES.items():
            plan = decode_plan(*shape, PAGE_TOKENS)
            found: dict[str, list[float]] = {
                "fused": [],
                "by layer": [],
                "ranks": [],
                "sums": [],
                "plan": [],
            }
            for _ in range(ROUNDS):
                torch.set_num_threads(2)
                for name, step in (("fused", fused), ("by layer", by_layer)):
                    began = time.perf_counter()
                    step(plan)
                    found[name].append(time.perf_counter() - began)
                torch.set_num_threads(1)
                number, collectives.seconds = number + 1, 0.0
                began = time.perf_counter()
                announced = lead.announce(_at(plan, number))
                found["plan"].append(time.perf_counter() - began)
                lead.run(announced)
                found["ranks"].append(time.perf_counter() - began)
                found["sums"].append(collectives.seconds)
            ms = {name: 1e3 * median(times) for name, times in found.items()}
            print(
                f"{case:16} one rank {ms['fused']:6.1f} ms, layer by layer {ms['by layer']:6.1f}, "
                f"two ranks {ms['ranks']:6.1f}, of it in collectives {ms['sums']:6.1f}, "
                f"in the agreement on the plan {ms['plan']:.1f}"
            )
    pair.close()


def _at(plan: StepPlan, step: int) -> StepPlan:
    return replace(plan, step=step)


if __name__ == "__main__":
    main()
