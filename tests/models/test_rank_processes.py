"""The ranks of a worker as processes, on one machine and as if they were on two."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal

import pytest
from msgspec.structs import replace
from tests.models.eagle3 import write_head
from tests.unit.model_worker.test_opening import SMALL, answers

from antiphon import embedded
from antiphon.config.model import Dtype
from antiphon.config.parallel import ParallelConfig
from antiphon.config.speculation import SpeculationConfig
from antiphon.model_worker.batching.loop import BatchingLoop
from antiphon.model_worker.batching.mailbox import Mailbox
from antiphon.model_worker.ranks.membership import RankLost
from antiphon.model_worker.ranks.processes import RankProcesses
from antiphon.model_worker.startup.engine import open_engine
from antiphon.service.startup import CannotStart
from antiphon.supervisor.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from antiphon.config.settings import Settings


PROMPTS = [[5, 6, 7], [11, 3, 90, 17] * 9, [8] * 20]
WAIT_S = 30.0


@contextmanager
def others(parallel: ParallelConfig) -> Iterator[RankProcesses]:
    """The ranks beside this process, which end in order."""
    second: subprocess.Popen[bytes] | None = None
    if parallel.nodes > 1:
        second = subprocess.Popen(
            [
                *(sys.executable, "-m", "antiphon.model_worker", "--parallel-node-rank", "1"),
                *("--parallel-tp-size", str(parallel.tp_size)),
                *("--parallel-pp-size", str(parallel.pp_size)),
                *("--parallel-attn-dp-size", str(parallel.attn_dp_size)),
                *("--parallel-nodes", str(parallel.nodes)),
                *("--parallel-init-address", parallel.init_address),
            ]
        )
    lost = SimpleQueue[RankLost]()
    ranks = RankProcesses(parallel, "worker-0", lost.put)
    try:
        yield ranks
    finally:
        ranks.close()
        if second is not None:
            second.wait(WAIT_S)
    assert lost.empty(), lost.get()
    assert second is None or second.returncode == 0
    assert all(child.returncode == 0 for child in ranks._children)


def settings(parallel: ParallelConfig, **model: object) -> Settings:
    return replace(
        SMALL, model=replace(SMALL.model, dtype=Dtype.FLOAT32, **model), parallel=parallel
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("sizes", "said", "nodes"),
    [
        ({"tp_size": 2}, "ranks:2", 2),
        ({"pp_size": 2}, "stages:2", 1),
        ({"tp_size": 2, "attn_dp_size": 2}, "ranks:2,attention groups:2", 1),
        pytest.param({"tp_size": 2}, "ranks:2", 1, marks=pytest.mark.long),
        pytest.param({"pp_size": 2}, "stages:2", 2, marks=pytest.mark.long),
        pytest.param(
            *({"tp_size": 2, "attn_dp_size": 2}, "ranks:2,attention groups:2", 2),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_worker_of_two_ranks_answers_as_one_process(
    sizes: dict[str, int], said: str, nodes: int
) -> None:
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    parallel = ParallelConfig(**sizes, nodes=nodes, init_address=address)
    expected = answers(open_engine(settings(ParallelConfig())), PROMPTS)
    with others(parallel) as ranks:
        engine = open_engine(settings(parallel), ranks)
        assert answers(engine, PROMPTS) == expected
        assert engine.resolved is not None
        assert engine.resolved.bits.value.endswith(said)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("algorithm", "overlapped"),
    [
        ("standalone", True),
        ("eagle3", False),
        pytest.param("standalone", False, marks=pytest.mark.long),
        pytest.param("eagle3", True, marks=pytest.mark.long),
    ],
)
def test_drafts_of_two_ranks_change_nothing(
    tmp_path: Path, algorithm: Literal["standalone", "eagle3"], overlapped: bool
) -> None:
    draft = embedded.path()
    if algorithm == "eagle3":
        draft = write_head(tmp_path, hidden=192, vocabulary=1024)
    parallel = ParallelConfig(tp_size=2)
    speculation = SpeculationConfig(algorithm=algorithm, draft_model=str(draft), draft_steps=3)
    expected = answers(open_engine(settings(ParallelConfig())), PROMPTS)
    with others(parallel) as ranks:
        engine = open_engine(replace(settings(parallel), speculation=speculation), ranks)
        launcher = engine.in_thread() if overlapped else engine.in_turn()
        loop = BatchingLoop(
            *(engine.core, launcher, Mailbox(1), lambda _: None),
            clock=lambda: 7.0,
            ahead=int(overlapped),
        )
        assert answers(engine, PROMPTS, loop) == expected
        totals = engine.core.totals()
        assert totals.drafts_proposed > 0
        right = totals.drafts_accepted > totals.drafts_proposed // 2
        assert right or algorithm == "eagle3"
        launcher.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelConfig(tp_size=3), "3 ranks"),
        (ParallelConfig(tp_size=2, ep_size=2), "parallel.ep_size: this model has no experts"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused_by_name(
    parallel: ParallelConfig, message: str
) -> None:
    ranks = RankProcesses(parallel, "worker-0", lambda _: None)
    try:
        with pytest.raises(CannotStart, match=message):
            open_engine(settings(parallel), ranks)
    finally:
        ranks.close()
