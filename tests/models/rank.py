"""Plans recorded on one rank, replayed by processes over gloo, each with its own shard.

As a program it is one of these: it samples by the recorded plans of every case of a folder.
"""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from tests.models.stepper import Stepper
from tests.models.tiny import VOCABULARY
from tests.support.models import open_model

from antiphon.layers.weights import SingleRank
from antiphon.model_worker.batching.plan import StepPlan
from antiphon.model_worker.batching.plan_buffer import pack, unpack


class Plans(msgspec.Struct):
    """The plans of a case, as one buffer."""

    plans: list[StepPlan]


class LoneRank(SingleRank):
    """One of several ranks, which sums nothing."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks


class GroupRank:
    """One rank of a torch process group (gloo on CPU, NCCL on GPUs)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = group.rank()
        self.ranks = group.size()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=-1)


def check_two_ranks(run: Path, vocabulary: int = VOCABULARY) -> dict[Path, list[list[int]]]:
    """Two ranks sample what one does, of every `case-*/model` in `run`; the tokens of each case."""
    expected: dict[Path, list[list[int]]] = {}
    for case in sorted(run.glob("case-*")):
        plans, expected[case] = run_on_one_rank(case / "model", vocabulary)
        (case / "plans").write_bytes(pack(Plans(plans)))
    run_on(2, run)
    for case, tokens in expected.items():
        for rank in range(2):
            sampled = msgspec.json.decode((case / f"tokens.{rank}.json").read_bytes())
            assert sampled == tokens, f"rank {rank} of {case.name}"
    return expected


def run_on_one_rank(folder: Path, vocabulary: int) -> tuple[list[StepPlan], list[list[int]]]:
    model = open_model(folder, dtype="float32")
    batch = Stepper(model.runner, model.groups)
    random = np.random.default_rng(3)
    for length in (3, 18, 40):
        line = batch.add(random.integers(0, vocabulary, length).tolist())
        line.temperature, line.seed = (0.0 if length == 3 else 0.8), length
    tokens: list[list[int]] = []
    run = model.runner.run

    def recording(plan, part=None):
        outcome = run(plan, part)
        tokens.append(outcome.token_ids.tolist())
        return outcome

    model.runner.run = recording
    batch.prefill(chunk=9)
    batch.decode(12, as_future=True)
    return batch.plans, tokens


def run_on(ranks: int, run: Path) -> None:
    command = [sys.executable, "-m", __name__, run]
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks)], stderr=subprocess.PIPE)
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors.decode()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(run: Path, rank: int, ranks: int) -> None:
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
            model = open_model(case / "model", dtype="float32", tp=GroupRank(group))
            plans = unpack(bytearray((case / "plans").read_bytes()), Plans).plans
            tokens = [model.runner.run(plan).token_ids.tolist() for plan in plans]
            (case / f"tokens.{rank}.json").write_bytes(msgspec.json.encode(tokens))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
