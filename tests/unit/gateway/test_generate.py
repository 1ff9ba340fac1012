"""The NATS API: replies, resumed, cancelled and retried requests; and clients that vanish."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pytest
from tests.support.nats import NatsServer
from tests.support.services import client_bus
from tests.support.wait import until
from tests.unit.gateway.calls import TEXT
from tests.unit.gateway.cluster import MODEL, SCRIPT, House, house, joining

from antiphon.gateway.nats import generate
from antiphon.wire.base import Message
from antiphon.wire.codec import decode, encode, encode_json, is_json, pack_ids
from antiphon.wire.errors import ErrorReply, InvalidRequest, Overloaded, WorkerLost
from antiphon.wire.generate import (
    GenerateAccepted,
    GenerateCancel,
    GenerateDone,
    GenerateEnd,
    GenerateRequest,
    GenerateResume,
    GenerateText,
    TextCursor,
)
from antiphon.wire.ids import ClientKey, RequestId
from antiphon.wire.routes import CLIENT_TEXT, GATEWAY_CONTROL, GENERATE
from antiphon.wire.sampling import (
    AllowRange,
    DisallowTokens,
    LogitBias,
    SamplingParams,
    StopStrings,
    TokenOutputParams,
)
from antiphon.wire.token_outputs import join_chunks, pack_floats
from antiphon.wire.tokenize import ChatMessage, TemplateParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from antiphon.bus.bus import Bus, Delivery
    from antiphon.bus.transport import Packet, Subscription
    from antiphon.wire.token_outputs import TokenOutputsChunk

M = TypeVar("M", bound=Message)

PREFIX = "test.v1."
GATEWAY = "gateway-0"


class Client:
    """A NATS client that keeps all messages of its one inbox."""

    def __init__(self, bus: Bus, tenant: str = "default") -> None:
        self.bus = bus
        self.tenant = tenant
        self.received: list[Message] = []
        self.as_json: list[bool] = []
        self.subscription: Subscription

    async def listen(self) -> None:
        self.subscription = await self.bus.listen(
            CLIENT_TEXT, self._receive, tenant=self.tenant, inbox="mine"
        )

    async def ask(
        self, request: GenerateRequest, *, json: bool = False, inbox: str | None = None
    ) -> None:
        data = encode_json(request) if json else encode(request)
        inbox = inbox or f"{PREFIX}client.{self.tenant}.mine"
        self.bus.transport.publish(PREFIX + GENERATE.subject_for(model=MODEL), data, inbox)

    async def first(self, kind: type[M], count: int = 1) -> M:
        await until(lambda: len(self.all(kind)) >= count)
        return self.all(kind)[count - 1]

    async def refusal(self) -> str:
        """The code of the error in place of acceptance."""
        return (await self.first(ErrorReply)).code

    async def end_error(self) -> str | None:
        """The code of the error at the end, if there is one."""
        error = (await self.first(GenerateEnd)).error
        return error and error.code

    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.received if isinstance(message, kind)]

    @property
    def text(self) -> str:
        """Text placed by offset, repeats cut off."""
        placed = b""
        for message in self.all(GenerateText):
            assert message.text_offset <= len(placed), "a gap"
            placed += message.text.encode()[len(placed) - message.text_offset :]
        return placed.decode()

    async def control(self, message: GenerateResume | GenerateCancel) -> None:
        done = await self.bus.call(GATEWAY_CONTROL, message, timeout_s=5.0, gateway=GATEWAY)
        assert done == GenerateDone(request_id=message.request_id)

    async def _receive(self, delivery: Delivery) -> None:
        self.received.append(decode(delivery.data, CLIENT_TEXT.carries))
        self.as_json.append(is_json(delivery.data))


@asynccontextmanager
async def visiting(at: House, tenant: str = "default") -> AsyncGenerator[Client]:
    async with client_bus(at.transport(), "c") as bus:
        client = Client(bus, tenant)
        await client.listen()
        yield client


@pytest.fixture
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "_PING_S", 0.05)


@pytest.fixture
async def client(at: House) -> AsyncIterator[Client]:
    async with visiting(at) as visitor:
        yield visitor


def request(key: str = "k", **fields: object) -> GenerateRequest:
    plain = GenerateRequest(
        key=ClientKey(key), model=MODEL, messages=(ChatMessage(role="user", content="hi"),)
    )
    return msgspec.structs.replace(plain, **fields)


@pytest.mark.parametrize("json", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_reply_has_the_encoding_of_the_request(
    client: Client, json: bool, stream: bool
) -> None:
    await client.ask(request(stream=stream), json=json)
    end = await client.first(GenerateEnd)
    accepted = client.received[0]
    assert isinstance(accepted, GenerateAccepted)
    assert accepted.gateway == GATEWAY
    assert set(client.as_json) == {json}
    choice = end.choices[0]
    assert (choice.finish_reason, choice.text_bytes) == ("stop", len(TEXT.encode()))
    assert (client.text, choice.text) == ((TEXT, None) if stream else ("", TEXT))
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (2, len(SCRIPT))
    assert end.error is None


@pytest.mark.parametrize("inbox", [f"{PREFIX}client.default", "client.default.x"])
async def test_foreign_inbox_gets_a_refusal_and_no_text(
    at: House, client: Client, inbox: str
) -> None:
    refusals: list[bytes] = []

    async def receive(packet: Packet) -> None:
        refusals.append(packet.data)

    await client.bus.transport.subscribe(inbox, receive)
    await client.ask(request(), inbox=inbox)
    await until(lambda: len(refusals) == 1)
    assert decode(refusals[0], (ErrorReply,)).code == "invalid_request"
    assert at.cluster.submits == []


async def test_route_as_an_inbox_gets_nothing_at_all(at: House, client: Client) -> None:
    subjects: list[str] = []

    async def receive(packet: Packet) -> None:
        subjects.append(packet.subject)

    route, foreign = f"{PREFIX}worker.worker-0.command", "client.default.x"
    for inbox in (route, foreign):
        await client.bus.transport.subscribe(inbox, receive)
        await client.ask(request(), inbox=inbox)
    await until(lambda: foreign in subjects)
    assert subjects == [foreign]
    assert at.cluster.submits == []


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model": "other"}, "model_not_found"),
        ({"messages": None}, "invalid_request"),
        ({"prompt": "also"}, "invalid_request"),
        ({"min_tokens": 9, "max_tokens": 8}, "invalid_request"),
        ({"logit_bias": {256: 1.0}}, "invalid_request"),
        ({"logit_bias": {5: float("nan")}}, "invalid_request"),
        ({"logit_bias": {5: 3e38}}, "invalid_request"),
        ({"processors": (DisallowTokens(token_ids=(256,)),)}, "invalid_request"),
        ({"details": TokenOutputParams(named_ids=(256,))}, "invalid_request"),
        ({"max_tokens": 1000}, "invalid_request"),
        ({"messages": (ChatMessage(role="user", content="x" * 64),)}, "prompt_too_long"),
    ],
)
async def test_bad_request_is_refused_in_place_of_accepting(
    client: Client, fields: dict[str, Any], code: str
) -> None:
    await client.ask(request(**fields))
    assert await client.refusal() == code
    assert client.all(GenerateAccepted) == []


async def test_every_field_of_a_request_reaches_the_leader(at: House, client: Client) -> None:
    processors = (DisallowTokens(token_ids=(5,)), AllowRange(first=0, last=99))
    details = TokenOutputParams(logprobs=True, top=3, named_ids=(9,), prompt_start=1)
    await client.ask(
        request(
            n=3,
            max_tokens=0,
            frequency_penalty=0.5,
            presence_penalty=-0.25,
            repetition_penalty=1.5,
            logit_bias={7: -1.5},
            processors=processors,
            details=details,
            token_texts=True,
            stop=("x",),
            stop_regex=("a+b",),
            no_stop_trim=True,
            skip_special_tokens=False,
            continue_final_message=True,
            tools='[{"type": "function"}]',
            chat_template_kwargs='{"thinking": false}',
            priority=-3,
            messages=(ChatMessage(role="assistant", content="c"),),
        )
    )
    await client.first(GenerateEnd)
    (submit,) = at.cluster.submits
    assert (submit.choices, submit.priority) == (3, -3)
    assert submit.stop == StopStrings(
        strings=("x",),
        patterns=("a+b",),
        include=True,
        skip_special_tokens=False,
        token_texts=True,
    )
    (encode,) = at.cluster.encodes
    assert encode.continue_final_message
    assert encode.template == TemplateParams(
        tools='[{"type": "function"}]', options='{"thinking": false}'
    )
    assert submit.sampling == SamplingParams(
        max_new_tokens=0,
        temperature=0.25,
        top_k=7,
        frequency_penalty=0.5,
        presence_penalty=-0.25,
        repetition_penalty=1.5,
        logit_bias=LogitBias(token_ids=pack_ids([7]), values=pack_floats([-1.5])),
        processors=processors,
        seed=submit.sampling.seed,
        details=details,
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_details_come_once_and_in_order_and_again_from_any_place(
    client: Client, stream: bool
) -> None:
    def details_of(choice: int) -> TokenOutputsChunk | None:
        return join_chunks(
            text.details for text in client.all(GenerateText) if text.choice == choice
        )

    params = TokenOutputParams(logprobs=True, top=1, prompt_start=0)
    await client.ask(request(stream=stream, details=params, token_texts=True, n=2))
    end = await client.first(GenerateEnd)
    assert client.all(GenerateAccepted)[0].details_from == -1
    assert [choice.details_end for choice in end.choices] == [len(SCRIPT)] * 2
    whole = details_of(1) if stream else end.choices[1].details
    assert whole is not None
    assert (whole.offset, whole.end) == (-1, len(SCRIPT))
    assert [detail.token_id for detail in whole.details.iter_tokens()] == [5, 10, 11, 12, 13]
    assert whole.texts[5] == "p"
    assert [whole.texts[10 + n] for n in range(len(SCRIPT))] == list(SCRIPT)
    if not stream:
        return
    client.received.clear()
    place = TextCursor(choice=1, text_offset=0, token_offset=2)
    await client.control(GenerateResume(request_id=end.request_id, places=(place,)))
    assert await client.first(GenerateEnd) == end
    first = details_of(0)
    assert first is not None
    assert (first.offset, first.end) == (-1, len(SCRIPT))
    assert details_of(1) == whole.beyond(2)


async def test_deadline_that_passes_while_encoding_is_a_deadline(at: House, client: Client) -> None:
    at.cluster.mute_tokenizers = 100
    await client.ask(request(timeout_s=0.05))
    assert await client.refusal() == "deadline"


async def test_refusal_of_the_leader_comes_in_place_of_accepting(at: House, client: Client) -> None:
    at.cluster.submit_error = Overloaded("full", retry_after_s=2.0)
    await client.ask(request())
    refusal = await client.first(ErrorReply)
    assert (refusal.code, refusal.retry_after_s) == ("overloaded", 2.0)
    at.cluster.submit_error = None
    await client.ask(request())
    await client.first(GenerateEnd)


async def test_error_during_generation_is_the_end_and_has_the_length(
    at: House, client: Client
) -> None:
    at.cluster.row_error = WorkerLost("the worker died")
    await client.ask(request())
    assert await client.end_error() == "worker_lost"
    (choice,) = client.all(GenerateEnd)[0].choices
    assert choice.text_bytes == len(client.text.encode()) > 0


async def test_retry_gets_the_reply_of_the_first_and_runs_once(at: House, client: Client) -> None:
    at.cluster.hold_at = 2
    await client.ask(request())
    await client.first(GenerateText, 2)
    await client.ask(request())
    accepted = await client.first(GenerateAccepted, 2)
    assert accepted == client.all(GenerateAccepted)[0]
    at.cluster.go.set()
    await client.first(GenerateEnd)
    await client.ask(request())
    await client.first(GenerateEnd, 2)
    assert client.text == TEXT
    assert len(at.cluster.submits) == 1
    assert len(set(client.all(GenerateEnd))) == 1


async def test_live_key_with_another_content_is_refused(at: House, client: Client) -> None:
    at.cluster.hold_at = 1
    await client.ask(request())
    await client.first(GenerateText)
    await client.ask(request(temperature=0.5))
    assert await client.refusal() == "duplicate_request"
    at.cluster.go.set()
    await client.first(GenerateEnd)
    await client.ask(request(temperature=0.5))
    await client.first(GenerateEnd, 2)
    assert len(at.cluster.submits) == 2


async def test_lost_text_is_sent_again_from_the_cursor_of_the_client(
    at: House, client: Client
) -> None:
    at.cluster.hold_at = 3
    await client.ask(request())
    await client.first(GenerateText, 3)
    first = client.all(GenerateText)[0]
    client.received[:] = [first]
    request_id = first.request_id
    place = TextCursor(choice=0, text_offset=len(first.text.encode()))
    await client.control(GenerateResume(request_id=request_id, places=(place,)))
    await until(lambda: client.text == "".join(SCRIPT[:3]))
    at.cluster.go.set()
    await client.first(GenerateEnd)
    client.received.clear()
    await client.control(GenerateResume(request_id=request_id))
    await client.first(GenerateEnd)
    assert client.text == TEXT


async def test_resume_inside_a_character_or_of_nothing_is_refused(
    at: House, client: Client
) -> None:
    await client.ask(request())
    end = await client.first(GenerateEnd)
    inside = TextCursor(choice=0, text_offset=TEXT.encode().index("ö".encode()) + 1)
    with pytest.raises(InvalidRequest, match="inside a character"):
        await client.control(GenerateResume(request_id=end.request_id, places=(inside,)))
    with pytest.raises(InvalidRequest, match="no such request"):
        await client.control(GenerateCancel(request_id=RequestId("nothing")))
    assert at.cluster.cancelled == []


async def test_another_tenant_can_neither_resume_nor_cancel(at: House, client: Client) -> None:
    at.cluster.hold_at = 1
    await client.ask(request())
    cancel = GenerateCancel(request_id=(await client.first(GenerateAccepted)).request_id)
    async with client_bus(at.transport(), "thief", party="scheduler") as thief:
        with pytest.raises(InvalidRequest):
            await thief.call(GATEWAY_CONTROL, cancel, timeout_s=5.0, gateway=GATEWAY)
    at.cluster.go.set()
    assert await client.end_error() is None


async def test_cancel_reaches_the_leader_and_ends_the_stream(at: House, client: Client) -> None:
    at.cluster.hold_at = 1
    await client.ask(request())
    accepted = await client.first(GenerateAccepted)
    await client.first(GenerateText)
    await client.control(GenerateCancel(request_id=accepted.request_id))
    assert await client.end_error() == "cancelled"
    await until(lambda: at.cluster.cancelled == [accepted.request_id])


@pytest.mark.usefixtures("quick_pings")
async def test_client_that_vanishes_is_cancelled(at: House, client: Client) -> None:
    await vanish(at, client)


@pytest.mark.usefixtures("quick_pings")
async def test_client_that_comes_back_in_time_keeps_its_request(at: House, client: Client) -> None:
    at.cluster.script = ("a", "b", "c", "d")
    at.cluster.hold_at = 2
    await client.ask(request())
    await client.first(GenerateText, 2)
    await client.subscription.drain()
    submitted = at.cluster.submits[0]
    await at.cluster.send(submitted, at.cluster.row(submitted, 2))
    held = at.service.generations._by_id[submitted.request_id]
    await until(lambda: held.probing)
    await client.listen()
    await until(lambda: not held.probing)
    at.cluster.go.set()
    await client.first(GenerateEnd)
    assert at.cluster.cancelled == []


@pytest.mark.usefixtures("quick_pings")
async def test_client_that_vanishes_from_a_real_broker_is_cancelled() -> None:
    async with NatsServer() as server, house(joining(server)) as at, visiting(at) as client:
        await client.ask(request("first"))
        assert await client.end_error() is None
        assert client.text == TEXT
        client.received.clear()
        await vanish(at, client)


async def vanish(at: House, client: Client) -> None:
    """Stop listening in the middle of an answer."""
    at.cluster.hold_at = 1
    await client.ask(request("away"))
    accepted = await client.first(GenerateAccepted)
    await client.first(GenerateText)
    await client.subscription.drain()
    submitted = at.cluster.submits[-1]
    await at.cluster.send(submitted, at.cluster.row(submitted, 1))
    await until(lambda: at.cluster.cancelled == [accepted.request_id])


async def test_stopped_gateway_ends_the_streams_of_its_clients() -> None:
    async with house(drain_timeout_s=0.1) as at, visiting(at) as client:
        at.cluster.hold_at = 1
        await client.ask(request())
        await client.first(GenerateText)
        at.gateway.stop.set()
        assert await client.end_error() == "unavailable"


async def test_eight_requests_at_once_get_their_own_text(at: House, client: Client) -> None:
    async with asyncio.TaskGroup() as group:
        for n in range(8):
            group.create_task(client.ask(request(f"k{n}", stream=False)))
    await client.first(GenerateEnd, 8)
    assert {end.choices[0].text for end in client.all(GenerateEnd)} == {TEXT}
    assert len({end.request_id for end in client.all(GenerateEnd)}) == 8
