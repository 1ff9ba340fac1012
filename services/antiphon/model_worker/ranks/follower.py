"""The process of a rank that computes what rank 0 plans, and has no connection to the bus."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from threading import Thread
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.model_card.served_model import draft_files, model_files
from antiphon.model_worker.batching.loop import SWITCH_INTERVAL_S
from antiphon.model_worker.ranks.layout import RankLayout
from antiphon.model_worker.ranks.membership import Attending, RankLost, address_of, join
from antiphon.model_worker.ranks.page_shards import FollowerShards, PageShard
from antiphon.model_worker.ranks.processes import RankStart, start_local
from antiphon.model_worker.ranks.protocol import FollowerRank, StepFacts, StepRefused, agree
from antiphon.model_worker.startup.checksums import verify_digest
from antiphon.model_worker.startup.host_device import host_device, interpret
from antiphon.model_worker.startup.loading import capture, load_resolved
from antiphon.service.main import CANNOT_START, FAILED, tune_gc
from antiphon.service.startup import CannotStart, die_with
from antiphon.telemetry import log as logs

if TYPE_CHECKING:
    from antiphon.config.parallel import ParallelConfig
    from antiphon.model_worker.ranks.groups import RankGroups
    from antiphon.model_worker.ranks.protocol import FollowerRunner, RankChannel

log = logging.getLogger(__name__)


def follow_node(parallel: ParallelConfig, instance: str) -> int:
    """Run the ranks of a machine that is not the first one  ->  an exit code."""
    first, *others = parallel.local_ranks
    address = address_of(parallel)
    start_local(others, parallel, address, instance)
    ranks = RankLayout.of(parallel)
    return follow(address, rank=first, ranks=ranks, instance=f"{instance}.{first}")


def follow(
    address: tuple[str, int],
    *,
    rank: int,
    ranks: RankLayout,
    instance: str,
    parent_pid: int | None = None,
) -> int:
    """Run one rank until rank 0 ends it  ->  an exit code. `address` is that of rank 0.

    It does not outlive rank 0, whose connection it watches, nor its parent, if it is given one.
    """
    logs.set_up(level="info", form="text", instance=instance)
    faulthandler.enable()
    if parent_pid is not None:
        # The worker ends its ranks in order; a signal to its whole process group must not do so.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    try:
        if parent_pid is not None:
            die_with(parent_pid)
        connection, store_port = join(address, rank, ranks.ranks)
    except (CannotStart, RankLost) as error:
        log.error(logs.CANNOT_START, extra={"reason": str(error)})  # noqa: TRY400  # one line
        return CANNOT_START
    attending = Attending(connection, _exit)
    try:
        from antiphon.model_worker.ranks.groups import RankGroups  # noqa: PLC0415 (imports torch)

        groups = RankGroups.open(rank, ranks, (address[0], store_port))
        follower = FollowerRank(groups.channel)
        runner, shards = _load(groups, follower, instance)
        tune_gc()
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # plans are checked while a collective is awaited
        Thread(target=follower.receive, args=(runner,), name="plans", daemon=True).start()
        follower.compute(runner, None if shards is None else shards.begin)
        attending.close()
        if shards is not None:
            shards.close()
    except (CannotStart, ConfigError, OSError) as error:
        log.error(logs.CANNOT_START, extra={"reason": str(error)})  # noqa: TRY400  # one line
        return CANNOT_START
    except Exception:
        log.critical("rank failed", exc_info=True)
        # Not in order: a thread may wait for a rank that will never answer.
        os._exit(FAILED)
    log.info("stopped")
    return 0


def _exit(reason: str) -> None:
    log.critical("rank lost", extra={"reason": reason})
    os._exit(FAILED)


def _load(
    groups: RankGroups, follower: FollowerRank, instance: str
) -> tuple[FollowerRunner, FollowerShards | None]:
    """Load this rank's shard as rank 0 says, and report that it is loaded, or is not.

    With it comes that of its pages, if they are stored outside the worker.
    """
    channel = groups.channel
    start = msgspec.msgpack.decode(channel.receive(), type=RankStart)
    settings, telemetry = start.settings, start.settings.telemetry
    logs.set_up(level=telemetry.log_level, form=telemetry.log_format, instance=instance)
    try:
        interpret(groups.device)
        files = model_files(settings)
        if channel.rank not in settings.parallel.local_ranks:  # of the machine of rank 0
            verify_digest(files, settings.cluster.model_digest)
        _check_arithmetic(host_device(groups.device).arithmetic, start.arithmetic)
        draft = draft_files(settings)
        model = load_resolved(files, start.resolved, draft, ranks=groups, exchange=follower)
    except (CannotStart, ConfigError):
        _report(channel, refused_by=1 + channel.rank)
        raise
    _report(channel, refused_by=0)
    capture(settings, start.resolved, model)
    if not settings.cache.hierarchical:
        return model.runner, None
    (link,) = groups.open_pages()
    shard = PageShard(model.codec(), groups.layout.shard(channel.rank))
    return model.runner, FollowerShards(shard, channel.rank, link)


def _check_arithmetic(here: dict[str, str], expected: dict[str, str]) -> None:
    if here != expected:
        raise CannotStart(f"numerics depend on {here} here, and on {expected} on rank 0")


def _report(channel: RankChannel, *, refused_by: int) -> None:
    """Report to all ranks whether this one has loaded."""
    try:
        agree(channel, StepFacts(refused_by=refused_by))
    except StepRefused as refused:
        if not refused_by:
            raise CannotStart(f"a rank has not loaded the model: {refused}") from refused
