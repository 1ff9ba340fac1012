"""One of two ranks: replays recorded plans on its shard and writes down what it sampled."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from antiphon.layers.tp import GroupRank
from antiphon.model_worker.batching.plan import SamplingColumns, StepPlan
from antiphon.model_worker.runner.open import open_model


class RecordedPlan(msgspec.Struct):
    """A plan as lists, so that it can be written to a file."""

    step: int
    slot: list[int]
    query_start: list[int]
    query_len: list[int]
    kv_len: list[int]
    adapter: list[int]
    tokens: list[int]
    positions: list[list[int]]
    logit_tokens: list[int]
    page_tables: list[list[list[int]]]
    temperature: list[float]
    top_p: list[float]
    min_p: list[float]
    top_k: list[int]
    seed: list[int]
    choice: list[int]


def record(plan: StepPlan) -> RecordedPlan:
    def column(name: str):
        owner = plan if hasattr(plan, name) else plan.sampling
        return getattr(owner, name).tolist()

    names = set(RecordedPlan.__struct_fields__) - {"step", "page_tables"}
    return RecordedPlan(
        step=plan.step,
        page_tables=[table.tolist() for table in plan.page_tables],
        **{name: column(name) for name in names},
    )


def replayed(recorded: RecordedPlan) -> StepPlan:
    def ints(values: list) -> np.ndarray:
        return np.array(values, np.int32)

    def floats(values: list[float]) -> np.ndarray:
        return np.array(values, np.float32)

    return StepPlan(
        step=recorded.step,
        slot=ints(recorded.slot),
        query_start=ints(recorded.query_start),
        query_len=ints(recorded.query_len),
        kv_len=ints(recorded.kv_len),
        adapter=ints(recorded.adapter),
        tokens=ints(recorded.tokens),
        positions=ints(recorded.positions),
        logit_tokens=ints(recorded.logit_tokens),
        page_tables=tuple(map(ints, recorded.page_tables)),
        sampling=SamplingColumns(
            temperature=floats(recorded.temperature),
            top_p=floats(recorded.top_p),
            min_p=floats(recorded.min_p),
            top_k=ints(recorded.top_k),
            seed=np.array(recorded.seed, np.int64),
            choice=ints(recorded.choice),
        ),
    )


def main(run: Path, rank: int, ranks: int, pages: int, page_tokens: int) -> None:
    """Replay every case of `run`: a folder each, with `model/` and `plans.json`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{run / 'meeting'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    group = dist.group.WORLD
    assert group is not None
    try:
        for case in sorted(run.glob("case-*")):
            model = open_model(
                case / "model",
                page_tokens=page_tokens,
                pages=pages,
                dtype="float32",
                tp=GroupRank(group),
            )
            plans = msgspec.json.decode((case / "plans.json").read_bytes(), type=list[RecordedPlan])
            tokens = [model.runner.run(replayed(plan)).token_ids.tolist() for plan in plans]
            (case / f"tokens.{rank}.json").write_bytes(msgspec.json.encode(tokens))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
