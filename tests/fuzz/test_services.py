"""Some thousand hostile messages at real services in one process: each lives, and serves after."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.fuzz.forger import Forger, Known
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.services import CLUSTER, QUICK, Running, client_bus, running
from tests.support.wait import until

from antiphon.client import Client
from antiphon.config.cluster import digest
from antiphon.detokenizer.service import DetokenizerService
from antiphon.encoder.service import EncoderService
from antiphon.gateway.service import GatewayService
from antiphon.kv_storage.service import KvStorageService
from antiphon.model_card.served_model import served_name
from antiphon.model_worker.service import ModelWorker
from antiphon.scheduler.service import SchedulerService
from antiphon.tokenizer.service import TokenizerService
from antiphon.wire.base import ProcessState

if TYPE_CHECKING:
    from antiphon.service.service import Service

SERVICES = (
    KvStorageService, EncoderService, TokenizerService, DetokenizerService, SchedulerService,
    ModelWorker, GatewayService,
)  # fmt: skip
MESSAGES = 1_500
AT_ONCE = 50
SETTINGS = msgspec.structs.replace(
    QUICK,
    service=msgspec.structs.replace(QUICK.service, heartbeat_s=0.25),
    gateway=msgspec.structs.replace(QUICK.gateway, port=0),
)


@pytest.mark.system
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_services_survive_hostile_messages_and_serve_after_them(seed: int) -> None:
    broker = MemoryBroker()
    async with AsyncExitStack() as stack:
        runs: list[Running[Service]] = [
            await stack.enter_async_context(
                running(kind, MemoryTransport(broker), settings=SETTINGS)
            )
            for kind in SERVICES
        ]
        bus = await stack.enter_async_context(client_bus(MemoryTransport(broker), "fuzz"))
        client = await stack.enter_async_context(Client(MemoryTransport(broker), cluster=CLUSTER))
        model = served_name(SETTINGS)
        before = await client.complete(model, "Count to five.", temperature=0.0, max_tokens=24)
        known = Known(
            model, {run.process.instance[:-2]: run.process for run in runs}, [],
            digest(SETTINGS.cluster),
        )  # fmt: skip
        forger = Forger(seed, known)
        for number in range(MESSAGES):
            forged = forger.next()
            reply = None if forged.reply is None else f"{CLUSTER}.v1.{forged.reply}"
            bus.transport.publish(f"{CLUSTER}.v1.{forged.subject}", forged.payload, reply)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
                gone = [run.process.instance for run in runs if run.gone.is_set()]
                assert not gone, f"seed {seed}, message {number}: {gone}"
        await until(
            lambda: sum(_refused(run) for run in runs) > MESSAGES / 4,
            timeout_s=60,
        )
        after = await client.complete(
            model, "Count to five.", temperature=0.0, max_tokens=24, timeout_s=30
        )
        assert after.text == before.text, f"seed {seed}"
        assert [
            run.process.instance for run in runs if run.health.state is not ProcessState.READY
        ] == []


def _refused(run: Running[Service]) -> float:
    return sum(
        sample.value
        for metric in run.metrics.registry.collect()
        if metric.name == "antiphon_messages_refused"
        for sample in metric.samples
        if sample.name.endswith("_total")
    )
