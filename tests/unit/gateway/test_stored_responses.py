"""Responses that are kept, in a real nats-server: found, continued, paged through, forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import msgspec
import pytest
from tests.bus.worlds import bus_config
from tests.support.nats import NatsServer
from tests.support.services import QUICK
from tests.support.wait import until
from tests.unit.gateway.calls import RESPONSES, TEXT, Body, ok, openai_client, post
from tests.unit.gateway.cluster import MODEL, House, house
from tests.unit.gateway.test_responses import events

from antiphon.bus.nats import NatsTransport
from antiphon.bus.store import KeyValueStore
from antiphon.gateway.http.openai.responses.items import InputText, MessageItem
from antiphon.gateway.http.openai.responses.store import StoredResponse, page_of
from antiphon.wire.errors import Unavailable, WorkerLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with NatsServer(durable=True) as running:
        yield running


@pytest.fixture
async def at(server: NatsServer) -> AsyncIterator[House]:
    async with house(joining(server)) as world:
        yield world


def joining(server: NatsServer) -> Callable[[], NatsTransport]:
    return lambda: NatsTransport(bus_config(server.url), name="test")


async def create(at: House, **said: object) -> Body:
    return await ok(at, RESPONSES, {"input": "hi"} | said)


async def ask(at: House, method: str, path: str, **query: str) -> tuple[int, Body]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"{at.url}{RESPONSES}/{path}", params=query) as reply,
    ):
        return reply.status, await reply.json()


async def refused(at: House, **said: object) -> tuple[int, object]:
    status, reply, _ = await post(at, RESPONSES, {"input": "hi"} | said)
    return status, reply["error"]["param"]


async def test_a_response_is_kept_as_it_was_told(at: House) -> None:
    whole = await create(at)
    assert whole["store"] is True
    assert await ask(at, "GET", whole["id"]) == (200, whole)
    told = (await events(at, store=True))[-1]["response"]
    assert await ask(at, "GET", told["id"]) == (200, told)


async def test_what_is_not_to_be_kept_is_not(at: House) -> None:
    whole = await create(at, store=False)
    assert whole["store"] is False
    status, reply = await ask(at, "GET", whole["id"])
    assert (status, reply["error"]["code"]) == (404, "response_not_found")
    assert (await ask(at, "DELETE", "resp_none"))[0] == 404
    assert (await ask(at, "GET", "resp_none/input_items"))[0] == 404
    assert await refused(at, previous_response_id="resp_none") == (400, "previous_response_id")


async def test_a_conversation_goes_on_without_the_responses_before(at: House) -> None:
    first = await create(at, input="one", instructions="Be short.")
    second = await create(at, input="two", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert (await ask(at, "DELETE", first["id"]))[1] == {
        "id": first["id"],
        "object": "response",
        "deleted": True,
    }
    assert (await ask(at, "GET", first["id"]))[0] == 404
    await create(at, input="three", previous_response_id=second["id"], store=False)
    messages = at.cluster.turns
    assert [(message.role, message.content) for message in messages] == [
        ("user", "one"),
        ("assistant", TEXT),
        ("user", "two"),
        ("assistant", TEXT),
        ("user", "three"),
    ]


async def test_the_items_that_a_response_was_made_from_are_told_in_pages(at: House) -> None:
    first = await create(at, input="one")
    second = await create(at, input="two", previous_response_id=first["id"])
    path = f"{second['id']}/input_items"
    _, page = await ask(at, "GET", path)
    data = page["data"]
    assert [item["role"] for item in data] == ["user", "assistant", "user"]
    assert data[0]["content"] == [{"type": "input_text", "text": "two"}]
    assert data[1] == first["output"][0]
    _, oldest = await ask(at, "GET", path, limit="1", order="asc")
    assert (oldest["data"], oldest["has_more"]) == ([data[2]], True)
    _, rest = await ask(at, "GET", path, after=data[0]["id"])
    assert (rest["data"], rest["has_more"]) == (data[1:], False)
    for query in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "msg_none"}):
        status, reply = await ask(at, "GET", path, **query)
        assert (status, reply["error"]["param"]) == (400, next(iter(query)))


async def test_a_response_that_fails_is_kept_as_failed(at: House) -> None:
    at.cluster.row_error = WorkerLost("the worker is gone")
    told = (await events(at, store=True))[-1]["response"]
    assert told["status"] == "failed"
    assert await ask(at, "GET", told["id"]) == (200, told)


async def test_openai_s_client_stores_finds_and_forgets(at: House) -> None:
    async with openai_client(at) as client:
        responses = client.responses
        made = await responses.create(model=MODEL, input="hi", metadata={"a": "b"})
        found = await responses.retrieve(made.id)
        assert found == made
        listed = await responses.input_items.list(made.id)
        assert [item.type for item in listed.data] == ["message"]
        await responses.delete(made.id)


async def test_a_conversation_that_is_too_long_to_be_kept_is_a_413(server: NatsServer) -> None:
    config = msgspec.structs.replace(QUICK.responses, conversation_bytes_max=150)
    async with house(joining(server), responses=config) as at:
        assert await refused(at, input="x" * 60) == (413, "input")
        await create(at, input="x" * 60, store=False)


async def test_where_nothing_is_kept_what_needs_it_is_refused() -> None:
    config = msgspec.structs.replace(QUICK.responses, store=False)
    async with house(responses=config) as at:
        assert (await create(at))["store"] is False
        assert await refused(at, store=True) == (400, "store")
        assert await refused(at, background=True) == (400, "background")
        assert await refused(at, previous_response_id="resp_1") == (400, "previous_response_id")
        assert (await ask(at, "GET", "resp_1"))[0] == 404


async def test_without_a_broker_that_keeps_them_only_store_false_is_answered() -> None:
    async with house() as plain:
        assert (await refused(plain))[0] == 503
        await create(plain, store=False)
        await until(lambda: plain.cluster.open == set())


async def test_a_response_that_cannot_be_kept_in_the_end_has_failed(
    at: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put(_: KeyValueStore, *key: str, value: bytes) -> None:
        raise Unavailable(f"no room for {len(value)} bytes of {key[0]}")

    await create(at)
    monkeypatch.setattr(KeyValueStore, "put", put)
    assert (await refused(at))[0] == 503
    told = await events(at, store=True)
    assert told[-1]["type"] == "response.failed"
    response = told[-1]["response"]
    assert response["output"][0]["status"] == "completed"


def test_a_page_of_nothing_is_empty() -> None:
    page = page_of([], {})
    assert (page.data, page.first_id, page.has_more) == ([], None, False)


def test_a_record_of_an_earlier_version_is_read() -> None:
    """What is kept outlives the version that kept it: fields may come, and none may go."""

    record = msgspec.json.decode(KEPT, type=StoredResponse)
    assert record.response.id == "resp_1"
    assert record.items == [MessageItem(id="msg_1", role="user", content=[InputText(text="hi")])]


KEPT = b"""{
  "response": {
    "id": "resp_1", "object": "response", "created_at": 1, "completed_at": 2,
    "status": "completed", "background": false, "error": null, "incomplete_details": null,
    "instructions": null, "max_output_tokens": null, "max_tool_calls": null, "metadata": {},
    "model": "toy", "output": [
      {"type": "reasoning", "id": "rs_1", "status": "completed", "summary": [],
       "content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": null},
      {"type": "message", "id": "msg_2", "status": "completed", "role": "assistant",
       "content": [{"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}]},
      {"type": "function_call", "id": "fc_1", "status": "completed", "call_id": "1",
       "name": "f", "arguments": "{}"}
    ],
    "parallel_tool_calls": true, "previous_response_id": null, "prompt_cache_key": null,
    "reasoning": {"effort": null, "summary": null}, "safety_identifier": null,
    "service_tier": "default", "store": true, "temperature": 1.0,
    "text": {"format": {"type": "text"}, "verbosity": "medium"}, "tool_choice": "auto",
    "tools": [{"type": "function", "name": "f", "description": null, "parameters": {},
               "strict": true}],
    "top_logprobs": 0, "top_p": 1.0, "truncation": "disabled",
    "usage": {"input_tokens": 1, "input_tokens_details": {"cached_tokens": 0,
              "cache_write_tokens": 0}, "output_tokens": 1,
              "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 2},
    "user": null
  },
  "items": [{"type": "message", "id": "msg_1", "status": null, "role": "user",
             "content": [{"type": "input_text", "text": "hi"}]}],
  "owner": {"instance": "gateway-0", "incarnation": "1"},
  "deadline_unix_ms": 1
}"""
