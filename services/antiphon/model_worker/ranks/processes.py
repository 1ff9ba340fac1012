"""The processes of the ranks of a worker, as rank 0 sees them: started, watched, ended together."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.settings import Settings
from antiphon.model_worker.ranks.layout import RankLayout, devices_of
from antiphon.model_worker.ranks.membership import Membership, RankLost, address_of
from antiphon.model_worker.ranks.protocol import LeadRank, StepFacts, StepRefused, agree
from antiphon.resolve.resolved_config import ResolvedConfig
from antiphon.service.main import FAILED
from antiphon.service.startup import CannotStart, bind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from antiphon.config.parallel import ParallelConfig
    from antiphon.model_worker.ranks.groups import RankGroups
    from antiphon.service.service import Runtime

log = logging.getLogger(__name__)

END_S = 1.5
"""How long rank 0 has to end in order once another rank is lost."""
LEAVE_S = 2.0
"""How long the other ranks have to end after the last plan."""


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """What the other ranks load, as rank 0 has resolved it."""

    settings: Settings
    resolved: ResolvedConfig
    arithmetic: dict[str, str]
    """What the numerics of rank 0 depend on; all ranks must have the same."""

    @classmethod
    def of(
        cls, settings: Settings, resolved: ResolvedConfig, arithmetic: dict[str, str]
    ) -> RankStart:
        """With the groups of settings that loading reads, none of which has a secret."""
        read = Settings(
            cluster=settings.cluster,
            model=settings.model,
            load=settings.load,
            parallel=settings.parallel,
            batching=settings.batching,
            cache=settings.cache,
            speculation=settings.speculation,
            telemetry=settings.telemetry,
        )
        return cls(settings=read, resolved=resolved, arithmetic=arithmetic)


def start_local(
    ranks: Sequence[int], parallel: ParallelConfig, address: tuple[str, int], instance: str
) -> list[subprocess.Popen[bytes]]:
    """Start ranks on this machine; each ends with the thread that calls this."""
    host, port = address
    return [
        subprocess.Popen(  # noqa: S603  # this interpreter, and arguments of our own
            [
                *(sys.executable, "-m", "antiphon.model_worker.ranks"),
                *("--address", f"{host}:{port}", "--rank", str(rank)),
                *("--tp-size", str(parallel.tp_size), "--pp-size", str(parallel.pp_size)),
                *("--attn-dp-size", str(parallel.attn_dp_size)),
                *("--instance", f"{instance}.{rank}"),
                *("--parent-pid", str(os.getpid())),
            ],
            stdin=subprocess.DEVNULL,
        )
        for rank in ranks
    ]


@asynccontextmanager
async def open_ranks(runtime: Runtime) -> AsyncGenerator[RankProcesses | None]:
    """Start the other ranks of a worker, if it has any, and end them in the end.

    If one is lost, `RankLost` is raised in the group of the runtime, and the process has `END_S` to
    end: a collective with ranks on other machines may hang.
    """
    parallel = runtime.settings.parallel
    if parallel.ranks == 1:
        yield None
        return
    event_loop = asyncio.get_running_loop()
    lost: asyncio.Future[None] = event_loop.create_future()

    def fail(error: RankLost) -> None:
        if not lost.done():  # it is cancelled at the end
            lost.set_exception(error)

    def on_lost(error: RankLost) -> None:
        end = threading.Timer(END_S, os._exit, (FAILED,))
        end.daemon = True
        end.start()
        with suppress(RuntimeError):  # the event loop has ended
            event_loop.call_soon_threadsafe(fail, error)

    async def watch() -> None:
        await lost

    # In the main thread, with which the ranks end.
    ranks = RankProcesses(parallel, runtime.process.instance, on_lost)
    runtime.group.create_task(watch(), name="ranks")
    try:
        yield ranks
    finally:
        ranks.close()


class RankProcesses:
    """The other ranks of a worker, whose rank 0 is this process.

    The ranks end together: if one is lost, those of this machine are killed, which fails every
    collective here, and `lost` is called in a thread of its own.
    """

    def __init__(
        self, parallel: ParallelConfig, instance: str, lost: Callable[[RankLost], None]
    ) -> None:
        """Start the ranks of this machine.

        Raises:
            CannotStart: The address is taken, or a process cannot be started.
        """
        try:
            parallel.check()
        except ConfigError as error:
            raise CannotStart(str(error)) from error
        host, port = address_of(parallel)
        listening = bind(host, port)
        self._store = bind(host, 0)
        self._store_address: tuple[str, int] = (host, self._store.getsockname()[1])
        self._parallel, self._ranks = parallel, RankLayout.of(parallel)
        self._local = parallel.nodes == 1
        self._lost = lost
        self._children: list[subprocess.Popen[bytes]] = []
        self._lead: LeadRank | None = None
        self._groups: RankGroups | None = None
        address = (host, listening.getsockname()[1])
        try:
            self._children = start_local(parallel.local_ranks[1:], parallel, address, instance)
        except OSError as error:
            raise CannotStart(f"a rank cannot be started: {error}") from error
        self._membership = Membership(
            listening, parallel.ranks, self._store_address[1], self._on_lost, self._ended
        )

    def meet(self, device: str) -> tuple[RankGroups, LeadRank]:
        """Connect the groups of all ranks, of which this one has a device. Blocks; imports torch.

        Raises:
            CannotStart: The ranks do not meet.
        """
        from antiphon.model_worker.ranks.groups import RankGroups  # noqa: PLC0415 (imports torch)

        try:
            groups = RankGroups.open(
                0,
                self._ranks,
                self._store_address,
                listening=self._store,
                local=self._local,
                devices=devices_of(self._parallel, device),
            )
        except OSError as error:
            raise CannotStart(str(error)) from error
        self._groups = groups
        self._lead = LeadRank(groups.channel)
        return groups, self._lead

    def load(self, start: RankStart) -> None:
        """Let the other ranks load their shards, while this one does."""
        assert self._groups is not None, "the ranks have met"
        self._groups.channel.send(bytearray(msgspec.msgpack.encode(start)))

    def loaded(self) -> None:
        """Wait until all ranks have loaded.

        Raises:
            CannotStart: One has not; its log says why.
        """
        assert self._groups is not None, "the ranks have met"
        try:
            agree(self._groups.channel, StepFacts())
        except StepRefused as refused:
            raise CannotStart(f"a rank has not loaded the model: {refused}") from refused
        except Exception as error:
            raise CannotStart(f"a rank is lost: {error}") from error
        self._membership.serve()

    def close(self) -> None:
        """End the other ranks; those of this machine are gone afterwards.

        Ranks that have not met wait for this one, and have nothing to end.
        """
        self._membership.stop()
        try:
            if self._lead is not None:
                self._lead.end()
                if not self._membership.wait_ended(LEAVE_S):
                    log.warning("ranks do not end", extra={"seconds": LEAVE_S})
                for child in self._children:
                    child.wait(LEAVE_S)
        except (subprocess.TimeoutExpired, RuntimeError) as error:
            log.warning("ranks are killed", extra={"reason": str(error)})
        self._kill()
        self._membership.close()
        self._store.close()

    def _ended(self) -> str | None:
        """Why a rank of this machine is gone."""
        for rank, child in enumerate(self._children, start=1):
            if (status := child.poll()) is not None:
                return f"rank {rank} has ended with status {status}"
        return None

    def _on_lost(self, reason: str) -> None:
        log.critical("rank lost", extra={"reason": reason})
        self._kill()
        if self._groups is not None:
            self._groups.abort()
        self._lost(RankLost(reason))

    def _kill(self) -> None:
        for child in self._children:
            child.kill()
        for child in self._children:
            if status := child.wait():
                log.info("rank ended", extra={"pid": child.pid, "status": status})
