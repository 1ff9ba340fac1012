"""The discovery verbs are answered in the shapes of ADR-32."""

from __future__ import annotations

from datetime import datetime

import msgspec
import pytest
from tests.bus.worlds import Mailbox, World, mailbox

from antiphon.bus.discovery import EndpointCounters, answer_discovery
from antiphon.wire.base import Process, Role
from antiphon.wire.ids import Incarnation, InstanceId

PROCESS = Process(instance=InstanceId("tokenizer-0"), incarnation=Incarnation("abc"))
HEAD = {
    "name": "antiphon-tokenizer",
    "id": "abc",
    "version": "0.1.0",
    "metadata": {"instance": "tokenizer-0", "cluster": "test"},
}


async def ask(world: World, *subjects: str) -> list[dict[str, object]]:
    """Start a tokenizer's discovery, ask, and return what came."""
    asker, answerer = await world.join(), await world.join()
    endpoint = EndpointCounters("tokenizer.encode", "test.v1.tokenizer.m.encode", "tokenizer")
    endpoint.count(0.25)
    endpoint.count(0.75, "overloaded")
    await answer_discovery(
        answerer,
        role=Role.TOKENIZER,
        process=PROCESS,
        version="0.1.0",
        cluster="test",
        endpoints=[endpoint],
    )
    box = await mailbox(asker, "inbox.1")
    for subject in subjects:
        asker.publish(subject, b"", "inbox.1")
    return [msgspec.json.decode(data) for data in await box.wait(len(subjects))]


@pytest.mark.parametrize("rest", ["", ".antiphon-tokenizer", ".antiphon-tokenizer.abc"])
async def test_ping_is_answered_on_all_three_subjects(world: World, rest: str) -> None:
    answers = await ask(world, f"$SRV.PING{rest}")
    assert answers == [{"type": "io.nats.micro.v1.ping_response", **HEAD}]


async def test_info_lists_the_endpoints(world: World) -> None:
    assert await ask(world, "$SRV.INFO") == [
        {
            "type": "io.nats.micro.v1.info_response",
            **HEAD,
            "description": "Antiphon tokenizer",
            "endpoints": [
                {
                    "name": "tokenizer.encode",
                    "subject": "test.v1.tokenizer.m.encode",
                    "queue_group": "tokenizer",
                }
            ],
        }
    ]


async def test_stats_count_requests_errors_and_nanoseconds(world: World) -> None:
    (answer,) = await ask(world, "$SRV.STATS.antiphon-tokenizer")
    started = answer.pop("started")
    assert datetime.fromisoformat(str(started)).tzinfo is not None
    assert answer == {
        "type": "io.nats.micro.v1.stats_response",
        **HEAD,
        "endpoints": [
            {
                "name": "tokenizer.encode",
                "subject": "test.v1.tokenizer.m.encode",
                "queue_group": "tokenizer",
                "num_requests": 2,
                "num_errors": 1,
                "last_error": "overloaded",
                "processing_time": 1_000_000_000,
                "average_processing_time": 500_000_000,
            }
        ],
    }


async def test_other_services_are_not_meant(world: World) -> None:
    await ask(world, "$SRV.PING")
    asker, box = world.transports[0], Mailbox()
    await asker.subscribe("inbox.2", box.receive)
    asker.publish("$SRV.PING.antiphon-gateway", b"", "inbox.2")
    await box.wait(1)
    assert box.packets[0].no_responders
