"""Ranks of a model: this process is the first, and others run this file as the others.

The same processes serve any number of models, one after the other, by the protocol with which the
ranks of a worker do.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from tests.support.models import plan, with_draft_model

from antiphon.config.parallel import ParallelConfig
from antiphon.layers.weights import SingleRank
from antiphon.model_worker.batching.loop import SWITCH_INTERVAL_S
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.ranks.groups import RankGroups
from antiphon.model_worker.ranks.layout import RankLayout, devices_of
from antiphon.model_worker.ranks.protocol import (
    FollowerRank,
    LeadRank,
    StepFacts,
    StepRefused,
    agree,
)
from antiphon.model_worker.runner.device_runner import DeviceRunner
from antiphon.model_worker.runner.opening import OpenModel, open_model
from antiphon.model_worker.startup.host_device import interpret

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = "127.0.0.1"


class Case(msgspec.Struct):
    """A model that all ranks load, and maybe its draft model; without a folder, the end."""

    folder: str = ""
    values: dict[str, Any] = {}
    draft: str = ""
    captured: tuple[int, ...] = ()


PREFILLS = (6, 24)
"""Numbers of tokens that are captured where anything is."""


class LoneRank(SingleRank):
    """One of several ranks, which sums nothing."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks


class Ranks:
    def __init__(
        self, tp: int = 1, pp: int = 1, dp: int = 1, *, local: bool = True, device: str = "cpu"
    ) -> None:
        self.layout = layout = RankLayout(tp, pp, dp)
        listening = socket.create_server((HOST, 0))
        port = listening.getsockname()[1]
        self._others = [
            subprocess.Popen([sys.executable, "-m", __name__, *map(str, (port, rank, *layout))])
            for rank in range(1, layout.ranks)
        ]
        self.groups = RankGroups.open(
            0,
            layout,
            (HOST, port),
            listening=listening,
            local=local,
            devices=devices_of(ParallelConfig(tp_size=tp, pp_size=pp), device),
        )

    @contextmanager
    def opened(
        self,
        folder: Path,
        captured: tuple[int, ...] = (),
        draft: Path | None = None,
        **values: Any,
    ) -> Iterator[tuple[OpenModel, LeadRank]]:
        """A model on all ranks, and what computes its plans; on a device some are `captured`."""
        channel, lead = self.groups.channel, LeadRank(self.groups.channel)
        case = Case(str(folder), values, "" if draft is None else str(draft), captured)
        self._send(case)
        model = _open(self.groups, lead, case)
        lead.use(model.runner)
        agree(channel, StepFacts())
        _capture(model, captured)
        try:
            yield model, lead
        finally:
            lead.end()

    def close(self) -> None:
        self._send(Case())
        assert [other.wait(10) for other in self._others] == [0] * len(self._others)

    def _send(self, case: Case) -> None:
        self.groups.channel.send(bytearray(msgspec.msgpack.encode(case)))


def _open(groups: RankGroups, exchange: LeadRank | FollowerRank, case: Case) -> OpenModel:
    folder, draft = Path(case.folder), Path(case.draft) if case.draft else None
    chosen = plan(folder, **case.values, device=groups.device)
    if draft is not None:
        chosen = with_draft_model(chosen, draft, **case.values)
    tensor, attention = groups.tensor_groups(invariant=chosen.deterministic.value)
    return open_model(
        folder,
        chosen,
        draft=draft,
        tp=tensor,
        pp=groups.pipeline,
        attention=attention,
        exchange=exchange,
    )


def _capture(model: OpenModel, sizes: tuple[int, ...]) -> None:
    if sizes:
        assert isinstance(model.runner, DeviceRunner), "the runner of a device"
        assert model.runner.capture(sizes).sizes == sizes
        assert model.runner.capture_prefills(PREFILLS).sizes == PREFILLS


def main(port: int, rank: int, *sizes: int) -> None:
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    groups = RankGroups.open(rank, RankLayout(*sizes), (HOST, port))
    channel = groups.channel
    interpret(groups.device)
    while (case := msgspec.msgpack.decode(channel.receive(), type=Case)).folder:
        follower = FollowerRank(channel)
        try:
            model = _open(groups, follower, case)
        except ModelLoadError:
            with suppress(StepRefused):
                agree(channel, StepFacts(refused_by=1 + rank))
            continue
        agree(channel, StepFacts())
        _capture(model, case.captured)
        runner = model.runner
        receiving = Thread(target=follower.receive, args=(runner,))
        receiving.start()
        follower.compute(runner)
        receiving.join()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
