"""Responses to NATS clients that are resumed: at any gateway, from any place, within a window."""

from __future__ import annotations

import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.support.services import client_bus
from tests.support.wait import until
from tests.unit.gateway.calls import TEXT
from tests.unit.gateway.cluster import SCRIPT, House, house, second_gateway
from tests.unit.gateway.test_generate import GATEWAY, Client, request, visiting

from antiphon.gateway.nats import generate
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.generate import (
    GenerateAccepted,
    GenerateCancel,
    GenerateEnd,
    GenerateText,
    ResumePosition,
    TextCursor,
)
from antiphon.wire.ids import RequestId
from antiphon.wire.routes import GATEWAY_CONTROL
from antiphon.wire.sampling import TokenOutputParams
from antiphon.wire.token_outputs import join_chunks

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from antiphon.wire.generate import GenerateRequest
    from antiphon.wire.token_outputs import TokenOutputsChunk

RESUME_S = 30.0
BOTH = {"gateway-0", "gateway-1"}


@pytest.fixture(autouse=True)
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "_PING_S", 0.02)


def resumed(
    first: GenerateRequest, request_id: str, *places: TextCursor, **fields: Any
) -> GenerateRequest:
    """The same request with a position, and with other `fields`."""
    position = ResumePosition(request_id=RequestId(request_id), places=places)
    return msgspec.structs.replace(first, resume_from=position, **fields)


def place(choice: int, text: str, token_offset: int | None = None) -> TextCursor:
    return TextCursor(choice=choice, text_offset=len(text.encode()), token_offset=token_offset)


def joined(pieces: Sequence[GenerateText], choice: int = 0) -> tuple[str, TokenOutputsChunk | None]:
    """The output of a choice, whose pieces must follow each other."""
    mine = [piece for piece in pieces if piece.choice == choice]
    text, details = b"", [piece.details for piece in mine if piece.details is not None]
    start = mine[0].text_offset if mine else 0
    for piece in mine:
        assert piece.text_offset == start + len(text)
        text += piece.text.encode()
    assert all(a.end == b.offset for a, b in itertools.pairwise(details))
    return text.decode(), join_chunks(details)


@asynccontextmanager
async def started(
    at: House, client: Client, steps: int, **fields: Any
) -> AsyncGenerator[tuple[GenerateRequest, RequestId]]:
    """A request with some steps of its output, which stops there until `go`, or the end."""
    at.cluster.hold_at = steps
    first = request(**{"resume_s": RESUME_S, **fields})
    await client.ask(first)
    accepted = await client.first(GenerateAccepted)
    if first.stream and steps:
        await client.first(GenerateText, steps * first.n)
    yield first, accepted.request_id
    at.cluster.go.set()  # else the gateway would wait for its end, as long as a drain may take


async def leave(at: House, client: Client, request_id: RequestId, step: int) -> None:
    """Stop listening, and wait until the gateway has found that out by a row."""
    await client.subscription.drain()
    (submitted,) = [one for one in at.cluster.submits if one.request_id == request_id]
    await at.cluster.send(submitted, at.cluster.row(submitted, step))
    await until(lambda: request_id not in at.service.generations._by_id)


async def test_response_goes_on_at_any_gateway_behind_what_the_client_has(at: House) -> None:
    """The earlier gateway says nothing more, not even that it has lost the request."""
    details = TokenOutputParams(logprobs=True, top=1, prompt_start=0)
    async with (
        visiting(at) as client,
        started(at, client, 2, n=2, details=details, token_texts=True) as (first, request_id),
        second_gateway(at),
    ):
        places = (place(0, SCRIPT[0], 1), place(1, "".join(SCRIPT[:2]), 2))
        gateways: set[str] = set()
        while gateways != BOTH:
            client.received.clear()
            await client.ask(resumed(first, request_id, *places))
            accepted = await client.first(GenerateAccepted)
            gateways.add(accepted.gateway)
            assert (accepted.request_id, accepted.details_from) == (request_id, -1)
            await client.first(GenerateText)
        at.cluster.go.set()
        end = await client.first(GenerateEnd)
        pieces = client.all(GenerateText)
        assert [choice.text_bytes for choice in end.choices] == [len(TEXT.encode())] * 2
        assert end.error is None
        for choice, known in enumerate((1, 2)):
            text, outputs = joined(pieces, choice)
            assert text == "".join(SCRIPT[known:])
            assert outputs is not None
            assert (outputs.offset, outputs.end) == (known, len(SCRIPT))
            assert [outputs.texts[one.token_id] for one in outputs.details.iter_tokens()] == list(
                SCRIPT[known:]
            )
        assert len(client.all(GenerateEnd)) == 1
        assert len(at.cluster.submits) == 1


async def test_response_that_is_resumed_at_another_gateway_keeps_its_name(at: House) -> None:
    async with (
        visiting(at) as client,
        started(at, client, 2, key="mine") as (first, request_id),
        second_gateway(at),
    ):
        gateways: list[str] = []
        while not (set(gateways) == BOTH and gateways[-1] == GATEWAY):
            client.received.clear()
            await client.ask(resumed(first, request_id, place(0, SCRIPT[0])))
            gateways.append((await client.first(GenerateAccepted)).gateway)
        submission = at.service.submission
        assert {stream.name for stream in submission.driver.streams()} == {("default", "mine")}
        client.received.clear()
        submission.abort("mine")
        end = await client.first(GenerateEnd)
        assert end.choices[0].finish_reason == "abort"
        await until(lambda: submission.idle)


async def test_client_that_comes_back_later_gets_the_rest(at: House) -> None:
    async with visiting(at) as client, started(at, client, 2) as (first, request_id):
        await leave(at, client, request_id, 2)
        assert at.open_count == 1
        client.received.clear()
        await client.listen()
        await client.ask(resumed(first, request_id, place(0, SCRIPT[0])))
        at.cluster.go.set()
        await client.first(GenerateEnd)
        assert joined(client.all(GenerateText))[0] == "".join(SCRIPT[1:])
        assert at.cluster.cancelled == []


async def test_response_whose_client_is_away_is_cancelled_by_its_tenant_only(at: House) -> None:
    async with visiting(at) as client, started(at, client, 2) as (_, request_id):
        await leave(at, client, request_id, 2)
        cancel = GenerateCancel(request_id=request_id)
        async with client_bus(at.transport(), "thief", party="scheduler") as thief:
            with pytest.raises(InvalidRequest):
                await thief.call(GATEWAY_CONTROL, cancel, timeout_s=5.0, gateway=GATEWAY)
        assert at.open_count == 1
        await client.control(cancel)
        await until(lambda: at.cluster.cancelled == [request_id])
        assert at.open_count == 0


async def test_response_that_ended_without_its_client_is_kept(at: House) -> None:
    async with visiting(at) as client, started(at, client, 2) as (first, request_id):
        await leave(at, client, request_id, 2)
        at.cluster.go.set()
        await until(lambda: at.open_count == 0)
        client.received.clear()
        await client.listen()
        await client.ask(resumed(first, request_id))
        end = await client.first(GenerateEnd)
        assert joined(client.all(GenerateText))[0] == TEXT
        assert end.choices[0].finish_reason == "stop"
        assert at.cluster.cancelled == []


@pytest.mark.parametrize(
    ("resume_s", "kept_max"), [(0.1, 256), (RESUME_S, 0)], ids=["time", "number"]
)
async def test_response_without_a_client_is_cancelled_in_the_end(
    resume_s: float, kept_max: int
) -> None:
    async with (
        house(resumable_max=kept_max) as at,
        visiting(at) as client,
        started(at, client, 1, resume_s=resume_s) as (_, request_id),
    ):
        await leave(at, client, request_id, 1)
        await until(lambda: at.cluster.cancelled == [request_id])


async def test_whole_response_is_resumed_as_a_whole(at: House) -> None:
    async with (
        visiting(at) as client,
        started(at, client, 2, stream=False) as (first, request_id),
        second_gateway(at),
    ):
        gateways: set[str] = set()
        while gateways != BOTH:
            client.received.clear()
            await client.ask(resumed(first, request_id))
            gateways.add((await client.first(GenerateAccepted)).gateway)
        at.cluster.go.set()
        end = await client.first(GenerateEnd)
        assert end.choices[0].text == TEXT
        assert client.all(GenerateText) == []


async def test_place_inside_a_character_is_answered_from_before_it(at: House) -> None:
    async with visiting(at) as client, started(at, client, 3) as (first, request_id):
        inside = len("".join(SCRIPT[:2]).encode()) + SCRIPT[2].encode().index("ö".encode()) + 1
        client.received.clear()
        await client.ask(resumed(first, request_id, TextCursor(choice=0, text_offset=inside)))
        await client.first(GenerateAccepted)
        at.cluster.go.set()
        await client.first(GenerateEnd)
        assert joined(client.all(GenerateText))[0] == "".join(SCRIPT[2:])


@pytest.mark.parametrize(
    ("fields", "name", "code"),
    [
        ({}, "0" * 32, "stream_not_found"),
        ({"temperature": 0.5}, "", "invalid_request"),
        ({"resume_s": 10.0}, "", "invalid_request"),
        ({"resume_s": None}, "", "invalid_request"),
        ({"resume_s": 61.0}, "", "invalid_request"),
    ],
)
async def test_resumption_of_something_else_is_refused(
    at: House, fields: dict[str, Any], name: str, code: str
) -> None:
    async with visiting(at) as client, started(at, client, 2) as (first, request_id):
        await client.ask(resumed(first, name or request_id, **fields))
        assert await client.refusal() == code
        at.cluster.go.set()
        assert await client.end_error() is None


async def test_choice_that_does_not_exist_is_refused(at: House) -> None:
    async with visiting(at) as client, started(at, client, 1) as (first, request_id):
        await client.ask(resumed(first, request_id, place(1, "")))
        assert await client.refusal() == "invalid_request"


async def test_another_tenant_cannot_resume(at: House) -> None:
    async with (
        visiting(at) as client,
        visiting(at, "other") as thief,
        started(at, client, 1) as (first, request_id),
    ):
        await thief.ask(resumed(first, request_id))
        assert await thief.refusal() == "stream_not_found"


async def test_stopped_gateway_leaves_the_end_to_another_one() -> None:
    async with (
        house(drain_timeout_s=0.1) as at,
        visiting(at) as client,
        started(at, client, 1) as (first, request_id),
        second_gateway(at),
    ):
        at.gateway.stop.set()
        await at.gateway.gone.wait()
        assert client.all(GenerateEnd) == []
        await client.ask(resumed(first, request_id))
        assert (await client.first(GenerateAccepted, 2)).gateway == "gateway-1"
        at.cluster.go.set()
        assert await client.end_error() is None
        assert client.text == TEXT
