"""Messages that no detokenizer sends: the gateway drops them, counts them, and goes on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.support.services import CLUSTER, client_bus
from tests.support.wait import until
from tests.unit.gateway.calls import CHAT, HI, failure, ok, running_post
from tests.unit.gateway.cluster import DETOKENIZER, SCRIPT, TERM, House

from antiphon.gateway.owner import request as owner_request
from antiphon.service.clock import SystemClock
from antiphon.wire.codec import encode
from antiphon.wire.errors import Unavailable, encode_error
from antiphon.wire.routes import DETOKENIZER_CONTROL, NOTICE, TEXT
from antiphon.wire.submit import LostRequest, NoticeBatch
from antiphon.wire.text import TextBatch

if TYPE_CHECKING:
    from antiphon.bus.bus import Bus

TEXT_SCRIPT = "".join(SCRIPT)
REFUSED = "antiphon_messages_refused_total"


def batch(at: House, **fields: object) -> dict[str, Any]:
    """A batch to the gateway that shows a gap, as a map."""
    whole = TextBatch(detokenizer=DETOKENIZER, gateway=at.gateway.process, seq=900, rows=())
    return {**msgspec.msgpack.decode(encode(whole)), **fields}


async def send(bus: Bus, at: House, message: dict[str, Any]) -> None:
    subject = f"{CLUSTER}.v1.{TEXT.subject_for(gateway=at.gateway.process.instance)}"
    bus.transport.publish(subject, msgspec.msgpack.encode(message))


async def content_of(at: House) -> str:
    reply = await ok(at, CHAT, {"messages": HI})
    return reply["choices"][0]["message"]["content"]


def sample(at: House, name: str, **labels: str) -> float | None:
    return at.gateway.metrics.registry.get_sample_value(name, labels)


@pytest.mark.parametrize(
    ("sender", "reason"),
    [
        ({"instance": "", "incarnation": "1"}, "malformed"),
        ({"instance": "x" * 5_000, "incarnation": "1"}, "malformed"),
        ({"instance": "d-0", "incarnation": "2"}, "unknown_sender"),
    ],
    ids=["nameless", "long name", "unknown"],
)
async def test_text_batch_of_a_wrong_sender_is_refused_and_counted(
    at: House, sender: dict[str, str], reason: str
) -> None:
    async with client_bus(at.transport(), "d", party="detokenizer") as bus:
        await send(bus, at, batch(at, detokenizer=sender))
        await until(
            lambda: (
                at.gateway.gone.is_set() or sample(at, REFUSED, route=TEXT.name, reason=reason) == 1
            )
        )
        assert await content_of(at) == TEXT_SCRIPT


async def test_notice_that_came_too_late_is_counted_and_ends_nothing(at: House) -> None:
    lost = encode_error(Unavailable("lost"))
    gateway = at.gateway.process
    async with (
        client_bus(at.transport(), "s", party="scheduler") as bus,
        running_post(at, CHAT, {"messages": HI}) as task,
    ):
        late = NoticeBatch(
            leader=TERM,
            gateway=gateway,
            requests=(LostRequest(request_id=at.cluster.submits[0].request_id, error=lost),),
            not_after_unix_ms=SystemClock().unix_ms() - 1000,
        )
        bus.publish(NOTICE, late, gateway=gateway.instance)
        await until(lambda: sample(at, "antiphon_late_messages_total", route=NOTICE.name) == 1)
    assert task.result().body["choices"][0]["message"]["content"] == TEXT_SCRIPT


async def test_call_that_fails_by_a_bug_does_not_end_the_gateway(
    at: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = asyncio.Event()
    bus = at.gateway.around.bus
    real = bus.call

    async def call(route: Any, *arguments: Any, **named: Any) -> Any:
        if route is DETOKENIZER_CONTROL:
            calls.set()
            raise ValueError("a bug, on purpose")
        return await real(route, *arguments, **named)

    monkeypatch.setattr(bus, "call", call)
    async with client_bus(at.transport(), "d", party="detokenizer") as sender:
        await send(sender, at, batch(at))
        await calls.wait()
        monkeypatch.setattr(bus, "call", real)
        assert await content_of(at) == TEXT_SCRIPT
        assert not at.gateway.gone.is_set()


async def test_text_row_that_cannot_be_applied_ends_its_request_alone(
    at: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, broken = owner_request.OwnedRequest.apply, list[str]()

    def apply(self: owner_request.OwnedRequest, row: Any) -> Any:
        if not broken or self.id in broken:
            broken.append(self.id)
            raise AssertionError("a bug, on purpose")
        return real(self, row)

    monkeypatch.setattr(owner_request.OwnedRequest, "apply", apply)
    status, error = await failure(at, CHAT, {"messages": HI})
    assert (status, error["code"]) == (500, "internal")
    assert await content_of(at) == TEXT_SCRIPT
