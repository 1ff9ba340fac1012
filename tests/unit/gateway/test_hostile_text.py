"""Messages that no detokenizer sends: the gateway drops them, counts them, and goes on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
from tests.support.services import CLUSTER, client_bus
from tests.support.wait import until
from tests.unit.gateway.cluster import DETOKENIZER, MODEL, SCRIPT, TERM, House

from antiphon.gateway.owner import request as owner_request
from antiphon.service.clock import SystemClock
from antiphon.wire.codec import encode
from antiphon.wire.errors import Unavailable, encode_error
from antiphon.wire.routes import DETOKENIZER_CONTROL, NOTICE, TEXT
from antiphon.wire.submit import LostRequest, NoticeBatch
from antiphon.wire.text import TextBatch

if TYPE_CHECKING:
    from antiphon.bus.bus import Bus

REFUSED = "antiphon_messages_refused_total"


def batch(at: House, **fields: object) -> dict[str, Any]:
    """A batch to the gateway that shows a gap, as a map."""
    whole = TextBatch(detokenizer=DETOKENIZER, gateway=at.gateway.process, seq=900, rows=())
    return {**msgspec.msgpack.decode(encode(whole)), **fields}


async def send(bus: Bus, at: House, message: dict[str, Any]) -> None:
    subject = f"{CLUSTER}.v1.{TEXT.subject_for(gateway=at.gateway.process.instance)}"
    bus.transport.publish(subject, msgspec.msgpack.encode(message))


async def ask(at: House) -> str:
    async with httpx.AsyncClient(base_url=at.url) as http:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        reply = await http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("instance", ["", "x" * 5_000])
async def test_text_batch_of_an_unspeakable_sender_is_refused_and_counted(
    at: House, instance: str
) -> None:
    async with client_bus(at.transport(), "d", party="detokenizer") as bus:
        await send(bus, at, batch(at, detokenizer={"instance": instance, "incarnation": "1"}))
        labels = {"route": TEXT.name, "reason": "malformed"}
        sample = at.gateway.metrics.registry.get_sample_value
        await until(lambda: at.gateway.gone.is_set() or sample(REFUSED, labels) == 1)
        assert await ask(at) == "".join(SCRIPT)


async def test_text_batch_of_an_unknown_sender_is_refused_and_counted(at: House) -> None:
    async with client_bus(at.transport(), "d", party="detokenizer") as bus:
        stranger = {"instance": "d-0", "incarnation": "2"}
        await send(bus, at, batch(at, detokenizer=stranger))
        labels = {"route": TEXT.name, "reason": "unknown_sender"}
        sample = at.gateway.metrics.registry.get_sample_value
        await until(lambda: sample(REFUSED, labels) == 1)
        assert await ask(at) == "".join(SCRIPT)


async def test_notice_that_came_too_late_is_counted_and_ends_nothing(at: House) -> None:
    at.cluster.hold_at = 1
    sample = at.gateway.metrics.registry.get_sample_value
    async with (
        client_bus(at.transport(), "s", party="scheduler") as bus,
        asyncio.TaskGroup() as group,
    ):
        answer = group.create_task(ask(at))
        await until(lambda: at.cluster.submits != [])
        gateway = at.gateway.process
        lost = encode_error(Unavailable("lost"))
        late = NoticeBatch(
            leader=TERM,
            gateway=gateway,
            requests=(LostRequest(request_id=at.cluster.submits[0].request_id, error=lost),),
            not_after_unix_ms=SystemClock().unix_ms() - 1000,
        )
        bus.publish(NOTICE, late, gateway=gateway.instance)
        await until(lambda: sample("antiphon_late_messages_total", {"route": NOTICE.name}) == 1)
        at.cluster.go.set()
    assert answer.result() == "".join(SCRIPT)


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
        assert await ask(at) == "".join(SCRIPT)
        assert not at.gateway.gone.is_set()


async def test_text_row_that_cannot_be_shown_ends_its_request_alone(
    at: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, broken = owner_request.OwnedRequest.apply, list[str]()

    def apply(self: owner_request.OwnedRequest, row: Any) -> Any:
        if not broken or self.id in broken:
            broken.append(self.id)
            raise AssertionError("a bug, on purpose")
        return real(self, row)

    monkeypatch.setattr(owner_request.OwnedRequest, "apply", apply)
    async with httpx.AsyncClient(base_url=at.url) as http:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        reply = await http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "internal"
    assert await ask(at) == "".join(SCRIPT)
