"""The client gives each byte of an answer out once and in order, or raises why not."""

from __future__ import annotations

import asyncio
import random
import re
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.services import CLUSTER
from tests.support.wait import until
from tests.unit.client.gateway import MODEL, USAGE, FakeGateway, Mischief, Request, gateway

from antiphon.bus.transport import NoResponders
from antiphon.client import Client, stream
from antiphon.client.client import BATCH, CALLS_MAX, EMBED_SILENCE_S
from antiphon.client.stream import (
    CALL_TIMEOUT_S,
    NO_RESPONDERS_TIMEOUT_S,
    SILENCE_S,
    TextAssembler,
)
from antiphon.wire import errors
from antiphon.wire.base import FinishReason
from antiphon.wire.bounds import RESUME_WINDOW_MAX_S
from antiphon.wire.codec import decode, pack_ids
from antiphon.wire.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unavailable,
    UnknownStream,
    WorkerLost,
)
from antiphon.wire.generate import (
    TEXTS_MAX,
    GenerateAccepted,
    GenerateCancel,
    GenerateEnd,
    GenerateOptions,
    GenerateRequest,
    GenerateResume,
    GenerateText,
)
from antiphon.wire.ids import RequestId
from antiphon.wire.routes import CLIENT_TEXT, EMBED, GATEWAY_CONTROL, GENERATE, escape
from antiphon.wire.token_outputs import TokenOutputs, TokenOutputsChunk, join_chunks
from antiphon.wire.tokenize import ChatMessage, MessageToolCall

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


SCRIPT = ("Grüße", ", ", "wörld ", "🌍", "", " and ", "日本", "!")
TEXT = "".join(SCRIPT)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask again soon, so that tests need not wait as clients do."""
    monkeypatch.setattr(stream, "SILENCE_S", 0.03)
    monkeypatch.setattr(stream, "CALL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(stream, "NO_RESPONDERS_TIMEOUT_S", 0.3)


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
def link(broker: MemoryBroker) -> MemoryTransport:
    return MemoryTransport(broker)


@pytest.fixture
async def client(link: MemoryTransport) -> AsyncGenerator[Client]:
    async with Client(link, cluster=CLUSTER) as client:
        yield client


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[None]:
    """Let a list grow by one for each call of a method of `GenerationStream`."""
    calls: list[None] = []
    method = getattr(stream.GenerationStream, name)

    def counted(self: stream.GenerationStream, *given: object) -> object:
        calls.append(None)
        return method(self, *given)

    monkeypatch.setattr(stream.GenerationStream, name, counted)
    return calls


async def read(client: Client, timeout_s: float = 5.0, **options: Unpack[GenerateOptions]) -> str:
    answer = client.generate(MODEL, "hi", timeout_s=timeout_s, **options)
    pieces = [piece.text async for piece in answer]
    assert all(pieces), "an empty piece is no piece"
    return "".join(pieces)


async def first_request(fake: FakeGateway) -> Request:
    await until(lambda: bool(fake.requests))
    return fake.requests[0]


@asynccontextmanager
async def reading(
    broker: MemoryBroker, client: Client
) -> AsyncGenerator[tuple[FakeGateway, Request, asyncio.Task[str]]]:
    """A gateway whose script is the test, its first request, and the task that reads its answer."""
    async with gateway(broker) as fake, asyncio.TaskGroup() as group:
        task = group.create_task(read(client))
        yield fake, await first_request(fake), task


async def test_answer_comes_piece_by_piece(broker: MemoryBroker, client: Client) -> None:
    async with gateway(broker, script=SCRIPT) as fake:
        pieces = [p.text async for p in client.generate(MODEL, "hi", max_tokens=9, stop=("x",))]
    assert pieces == [text for text in SCRIPT if text]
    (request,) = fake.requests
    assert (request.request.max_tokens, request.request.stop) == (9, ("x",))
    assert (fake.submits, fake.resumes) == (1, 0)
    assert not request.cancelled.is_set()


async def test_piece_is_yielded_before_the_next_is_made(
    broker: MemoryBroker, client: Client
) -> None:
    async with gateway(broker) as fake, asyncio.TaskGroup() as group:
        pieces = client.generate(MODEL, "hi")
        first = group.create_task(anext(pieces))
        request = await first_request(fake)
        await fake.say(request, "one")
        assert (await first).text == "one"
        await fake.say(request, "two")
        assert (await anext(pieces)).text == "two"
        await fake.finish(request)
        assert [piece async for piece in pieces] == []


async def test_whole_answer_is_requested_unstreamed(broker: MemoryBroker, client: Client) -> None:
    async with gateway(broker, script=SCRIPT) as fake:
        answer = await client.complete(MODEL, [("system", "Be brief."), ("user", "hi")])
    (request,) = fake.requests
    assert (answer.text, answer.finish_reason, answer.usage) == (TEXT, FinishReason.STOP, USAGE)
    assert answer.request_id == request.id
    assert not request.request.stream
    assert [turn.role for turn in request.request.messages or ()] == ["system", "user"]


async def test_turns_with_calls_are_asked_as_they_are(broker: MemoryBroker, client: Client) -> None:
    call = MessageToolCall(id="1", name="add", arguments='{"a": 1}')
    turns = [
        ("user", "hi"),
        ChatMessage(role="assistant", content="", tool_calls=(call,)),
        ChatMessage(role="tool", content="2", tool_call_id="1"),
    ]
    async with gateway(broker, script=SCRIPT) as fake:
        await client.complete(MODEL, turns)
    (request,) = fake.requests
    assert request.request.messages == (ChatMessage(role="user", content="hi"), *turns[1:])


@pytest.mark.parametrize("seed", range(40))
async def test_text_is_complete_despite_lost_repeated_and_reordered_messages(
    seed: int, broker: MemoryBroker, client: Client
) -> None:
    chance = random.Random(seed)
    shares = [chance.choice((0.0, 0.1, 0.4)) for _ in range(3)]
    script = tuple("".join(chance.choices("aé日🌍", k=chance.randrange(5))) for _ in range(30))
    async with gateway(broker, script=script, mischief=Mischief(seed, *shares)):
        assert await read(client) == "".join(script), f"seed {seed}, shares {shares}"
        assert (await client.complete(MODEL, "hi", timeout_s=5)).text == "".join(script)


@pytest.mark.parametrize(
    "kind", [GenerateAccepted, GenerateText, GenerateEnd], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("times", [1, 3])
async def test_each_kind_of_message_may_be_lost(
    kind: type[GenerateText], times: int, broker: MemoryBroker, client: Client
) -> None:
    async with gateway(broker, script=SCRIPT) as fake:
        fake.mute[kind] = times
        assert await read(client) == TEXT


@pytest.mark.parametrize("kind", [GenerateRequest, GenerateResume], ids=lambda kind: kind.__name__)
async def test_client_survives_the_loss_of_its_own_messages(
    kind: type[GenerateRequest], broker: MemoryBroker, client: Client
) -> None:
    async with gateway(broker, script=SCRIPT) as fake:
        fake.deaf_to[kind] = 2
        fake.mute[GenerateText] = 2
        assert await read(client) == TEXT
        assert len(fake.requests) == 1, "a retry under the same key is no second request"


async def test_end_before_missing_text_is_not_the_end(broker: MemoryBroker, client: Client) -> None:
    async with reading(broker, client) as (fake, request, task):
        await fake.say(request, "one ")
        fake.mute[GenerateText] = 1
        await fake.say(request, "two")
        await fake.finish(request)
        assert await task == "one two"
        assert fake.resumes == 1


async def test_one_gap_is_asked_for_once(
    broker: MemoryBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything behind a gap shows it again until it is filled."""
    monkeypatch.setattr(stream, "SILENCE_S", 5.0)
    async with gateway(broker, script=tuple("a long answer in many pieces")) as fake:
        fake.mute[GenerateText] = 1
        assert await read(client) == "a long answer in many pieces"
        assert fake.resumes == 1


async def test_leaving_the_loop_early_cancels(broker: MemoryBroker, client: Client) -> None:
    async with gateway(broker) as fake, asyncio.TaskGroup() as group:

        async def read_one() -> str:
            async for piece in client.generate(MODEL, "hi"):
                return piece.text
            return ""

        reading = group.create_task(read_one())
        request = await first_request(fake)
        await fake.say(request, "one")
        assert await reading == "one"
        await until(request.cancelled.is_set)


async def test_leaving_the_client_cancels_what_was_not_read(broker: MemoryBroker) -> None:
    async with gateway(broker) as fake, asyncio.TaskGroup() as group:
        async with Client(MemoryTransport(broker), cluster=CLUSTER) as client:
            pieces = client.generate(MODEL, "hi")
            first = group.create_task(anext(pieces))
            request = await first_request(fake)
            await fake.say(request, "one")
            await first
        assert request.cancelled.is_set()
        await pieces.aclose()


async def test_cancelled_caller_cancels_its_request(broker: MemoryBroker, client: Client) -> None:
    async with reading(broker, client) as (fake, request, task):
        await fake.say(request, "one")
        await asyncio.sleep(0)
        task.cancel()
        await until(request.cancelled.is_set)


async def test_timeout_cancels_and_raises(broker: MemoryBroker, client: Client) -> None:
    async with gateway(broker) as fake:
        with pytest.raises(DeadlineExceeded):
            await read(client, timeout_s=0.1)
        (request,) = fake.requests
        assert request.cancelled.is_set()
        assert request.request.timeout_s == 0.1, "the cluster knows it too"


async def test_no_responders_fail_at_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SILENCE_S", 60.0)
    monkeypatch.setattr(stream, "NO_RESPONDERS_TIMEOUT_S", 60.0)
    async with asyncio.timeout(1):
        with pytest.raises(NoResponders, match="no gateway serves this model"):
            await read(client)
        with pytest.raises(NoResponders, match="no gateway serves this model"):
            await client.complete(MODEL, "hi")


async def test_refusal_is_raised_as_its_type(broker: MemoryBroker, client: Client) -> None:
    async with gateway(broker) as fake:
        fake.refuses = Overloaded("full", retry_after_s=3.0)
        with pytest.raises(Overloaded) as caught:
            await read(client)
        assert caught.value.retry_after_s == 3.0
    with pytest.raises(InvalidRequest, match="temperature"):
        await client.complete(MODEL, "hi", temperature=-1)


async def test_error_at_the_end_follows_the_text(broker: MemoryBroker, client: Client) -> None:
    async with gateway(broker) as fake, asyncio.TaskGroup() as group:
        pieces = client.generate(MODEL, "hi")
        first = group.create_task(anext(pieces))
        request = await first_request(fake)
        await fake.say(request, "one")
        await fake.finish(request, WorkerLost("the worker is gone"))
        assert (await first).text == "one"
        with pytest.raises(WorkerLost, match="the worker is gone"):
            await anext(pieces)
        assert not request.cancelled.is_set()


async def test_link_that_drops_and_comes_back_loses_nothing(
    broker: MemoryBroker, link: MemoryTransport, client: Client
) -> None:
    async with reading(broker, client) as (fake, request, task):
        await fake.say(request, "before ")
        broker.cut(link)
        await fake.say(request, "meanwhile ")
        await fake.finish(request)
        broker.heal(link)
        assert await task == "before meanwhile "
        assert not request.cancelled.is_set()


async def test_request_made_while_the_link_is_down_is_sent_when_it_is_up(
    broker: MemoryBroker, link: MemoryTransport, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = count_calls(monkeypatch, "_submit")
    async with gateway(broker, script=SCRIPT) as fake, asyncio.TaskGroup() as group:
        broker.cut(link)
        reading = group.create_task(read(client))
        await until(lambda: len(tries) > 1)
        assert fake.submits == 0
        broker.heal(link)
        assert await reading == TEXT


async def test_gateway_that_finds_the_broker_later_than_we_is_waited_for(
    broker: MemoryBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "NO_RESPONDERS_TIMEOUT_S", 5.0)
    found_nobody = count_calls(monkeypatch, "_on_no_responders")
    async with reading(broker, client) as (fake, request, task):
        await fake.say(request, "one ")
        await fake.die()
        await until(lambda: len(found_nobody) > 1)
        await fake.listen()
        await fake.say(request, "two")
        await fake.finish(request)
        assert await task == "one two"


@pytest.mark.parametrize("again", [False, True], ids=["gone for good", "restarted"])
async def test_dead_gateway_ends_requests(
    again: bool, broker: MemoryBroker, client: Client
) -> None:
    async with gateway(broker) as fake, asyncio.TaskGroup() as group:
        failing = group.create_task(failure(client))
        request = await first_request(fake)
        await fake.say(request, "one")
        await fake.die()
        fake.requests.clear()
        if again:
            await fake.listen()
        assert isinstance(await failing, Unavailable)


async def failure(client: Client, **options: Unpack[GenerateOptions]) -> Exception:
    with pytest.raises(Unavailable) as caught:
        await read(client, **options)
    return caught.value


@pytest.mark.parametrize("kind", ["dead", "restarted", "frozen"])
async def test_response_is_resumed_at_another_gateway(
    kind: str, broker: MemoryBroker, client: Client
) -> None:
    async with gateway(broker) as fake, asyncio.TaskGroup() as group:
        reading = group.create_task(read(client, resume_s=30.0))
        request = await first_request(fake)
        await fake.say(request, "Grüße, ")
        await until(lambda: fake.resumes > 0)  # nothing follows, and it has been read
        async with gateway(broker, name="gateway-1") as other:
            other.requests = [request]
            if kind == "frozen":
                fake.deaf_to = {GenerateRequest: 1000, GenerateResume: 1000}
            else:
                await fake.die()
                fake.requests = []
            if kind == "restarted":
                fake.refuses_adoptions = [Unavailable("no leader is known yet")] * 1000
                await fake.listen()
            await until(lambda: other.adoptions > 0)
            await other.say(request, "wörld")
            await other.finish(request)
            assert await reading == "Grüße, wörld"


async def test_whole_response_is_resumed_too(broker: MemoryBroker, client: Client) -> None:
    async with gateway(broker) as fake, asyncio.TaskGroup() as group:
        reading = group.create_task(client.complete(MODEL, "hi", timeout_s=5.0, resume_s=30.0))
        request = await first_request(fake)
        await until(lambda: fake.resumes > 0)
        async with gateway(broker, name="gateway-1") as other:
            await fake.die()
            other.requests = [request]
            await until(lambda: other.adoptions > 0)
            await other.say(request, TEXT)
            await other.finish(request)
            assert (await reading).text == TEXT


async def test_response_that_cannot_be_resumed_fails(broker: MemoryBroker, client: Client) -> None:
    """Its window may be over; errors that pass are survived."""
    async with gateway(broker) as fake, asyncio.TaskGroup() as group:
        failing = group.create_task(failure(client, resume_s=30.0))
        request = await first_request(fake)
        await fake.say(request, "one")
        await until(lambda: fake.resumes > 0)
        fake.requests.clear()
        fake.refuses_adoptions = [Unavailable("later"), Overloaded("full", retry_after_s=1.0)]
        assert isinstance((await failing).__cause__, UnknownStream)
        assert fake.adoptions == 3


async def test_gateways_are_looked_for_within_the_window(
    broker: MemoryBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "NO_RESPONDERS_TIMEOUT_S", 0.0)
    async with gateway(broker) as fake, asyncio.TaskGroup() as group:
        failing = group.create_task(failure(client, resume_s=0.2))
        await fake.say(await first_request(fake), "one")
        await fake.die()
        assert isinstance(await failing, NoResponders)


async def test_retry_that_another_gateway_takes_is_cancelled_and_never_mixed_in(
    broker: MemoryBroker, client: Client
) -> None:
    """Both answer on one inbox, from their own beginnings and with their own words."""
    async with gateway(broker) as slow, asyncio.TaskGroup() as group:
        slow.mute[GenerateAccepted] = 1
        reading = group.create_task(read(client))
        first = await first_request(slow)
        await slow.say(first, "mine, ")
        async with gateway(broker, name="gateway-1") as other:
            await slow.die()  # so that the retry goes to the other
            second = await first_request(other)
            await slow.listen()
            # Its acceptance arrives now, when the other's has been taken.
            await slow._tell(first, slow._accepted(first))
            await slow.say(first, "all mine")
            await slow.finish(first)
            await other.say(second, "another ")
            await other.say(second, "answer")
            await until(first.cancelled.is_set)
            await other.finish(second)
            assert await reading == "another answer"
            assert not second.cancelled.is_set()


async def test_slow_caller_gets_everything(
    broker: MemoryBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "EVENTS_MAX", 4)
    script = tuple("much more than waits for a slow caller")
    async with gateway(broker, script=script) as fake:
        said = ""
        async for piece in client.generate(MODEL, "hi", timeout_s=5):
            said += piece.text
            await asyncio.sleep(0.002)
        assert said == "".join(script)
        assert fake.resumes >= 1


@asynccontextmanager
async def two_clients(broker: MemoryBroker) -> AsyncGenerator[tuple[Client, Client]]:
    async with (
        Client(MemoryTransport(broker), cluster=CLUSTER) as one,
        Client(MemoryTransport(broker), cluster=CLUSTER, tenant="other") as other,
    ):
        yield one, other


async def test_many_requests_at_a_time_stay_apart(broker: MemoryBroker) -> None:
    mischief = Mischief(1, lost=0.1, repeated=0.1, late=0.1)
    async with gateway(broker, script=SCRIPT, mischief=mischief) as fake:
        async with two_clients(broker) as clients, asyncio.TaskGroup() as group:
            asked = [group.create_task(read(client)) for client in clients for _ in range(20)]
        assert {task.result() for task in asked} == {TEXT}
        assert len(fake.requests) == 40
        inboxes = {request.delivery.reply for request in fake.requests}
        assert len(inboxes) == 40
        assert sum(".client.other." in (inbox or "") for inbox in inboxes) == 20


async def test_lost_cancel_delays_no_caller(broker: MemoryBroker, client: Client) -> None:
    async with gateway(broker) as fake, asyncio.TaskGroup() as group:
        fake.deaf_to[GenerateCancel] = 1
        pieces = client.generate(MODEL, "hi")
        first = group.create_task(anext(pieces))
        await fake.say(await first_request(fake), "one")
        await first
        async with asyncio.timeout(1):
            await pieces.aclose()


MIXED = "aé日🙂" * 4
BYTES = len(MIXED.encode())
BORDERS = [len(MIXED[:at].encode()) for at in range(len(MIXED) + 1)]
FIRST, LAST = -3, 12


def piece(start: int, stop: int, begin: int, end: int) -> GenerateText:
    """Text from one border to another, with the details of so many tokens."""
    details = TokenOutputs(count=end - begin, token_ids=pack_ids(range(100 + begin, 100 + end)))
    return GenerateText(
        request_id=RequestId("r"),
        choice=0,
        text_offset=start,
        text=MIXED.encode()[start:stop].decode(),
        details=TokenOutputsChunk(offset=begin, details=details),
    )


BORDER = st.integers(0, len(MIXED)).map(BORDERS.__getitem__)
STRETCH = st.tuples(BORDER, BORDER).map(sorted)
TOKENS = st.tuples(st.integers(FIRST, LAST), st.integers(FIRST, LAST)).map(sorted)


@given(st.lists(st.tuples(STRETCH, TOKENS), max_size=30))
def test_text_and_details_are_given_out_once_and_in_order(pieces) -> None:
    placing, text = TextAssembler(FIRST), ""
    details: list[TokenOutputsChunk | None] = []
    for (start, stop), (first, end) in [*pieces, ((0, BYTES), (FIRST, LAST))]:
        have, known = placing.text_offset(0), placing.token_offset(0)
        new = placing.add(piece(start, stop, first, end))
        assert (new is None) == (start > have or first > known)
        if new is not None:
            assert new.text_offset == have
            text += new.text
            details.append(new.details)
        assert placing.text_offset(0) == len(text.encode())
    assert text == MIXED
    whole = join_chunks(details)
    assert whole is not None
    assert whole.offset == FIRST
    assert [detail.token_id for detail in whole.details.iter_tokens()] == list(
        range(100 + FIRST, 100 + LAST)
    )
    (place,) = placing.cursors
    assert (place.text_offset, place.token_offset) == (BYTES, LAST)


HTTP_ONLY = (errors.HeadersTooLarge, errors.UnknownResponse)
PAGE = (Path(__file__).parents[3] / "docs" / "nats-client.md").read_text(encoding="utf-8")


def test_page_shows_every_message_and_the_figures_of_the_client() -> None:
    blocks = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    examples = [one for block in blocks for one in re.split(r"\n(?=\{)", block.strip())]
    kinds = (
        *GENERATE.carries,
        *CLIENT_TEXT.carries,
        *GATEWAY_CONTROL.carries,
        *EMBED.carries,
        *EMBED.replies,
    )
    seen = {type(decode(example.encode(), kinds)) for example in examples}
    assert seen == set(kinds)
    assert f"after {SILENCE_S:g} seconds in which" in PAGE
    assert f"answered within {CALL_TIMEOUT_S:g} seconds" in PAGE
    assert f"(at most {RESUME_WINDOW_MAX_S:g})" in PAGE
    codes = {name for name, error in errors._TYPES.items() if not issubclass(error, HTTP_ONLY)}
    assert codes <= set(re.findall(r"`(\w+)`", PAGE))
    assert NO_RESPONDERS_TIMEOUT_S < 10, "it says a few seconds"
    assert f"At most {TEXTS_MAX}\ntexts go into a request" in PAGE
    assert (BATCH, CALLS_MAX, EMBED_SILENCE_S) == (16, 4, 60.0)
    assert f"`{escape('llama-3.1')}`" in PAGE
