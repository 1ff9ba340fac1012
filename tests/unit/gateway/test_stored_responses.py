"""Stored responses on a real nats-server: read, continued, paged through, deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.support.services import QUICK
from tests.support.wait import until
from tests.unit.gateway.calls import RESPONSES, TEXT, Body, call, ok, openai_client, refusal
from tests.unit.gateway.cluster import MODEL, House, house, joining
from tests.unit.gateway.test_responses import events

from antiphon.bus.store import KeyValueStore
from antiphon.gateway.http.openai.responses.items import InputText, MessageItem
from antiphon.gateway.http.openai.responses.store import StoredResponse, page_of
from antiphon.wire.errors import Unavailable, WorkerLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.nats import NatsServer


@pytest.fixture
async def at(server: NatsServer) -> AsyncIterator[House]:
    async with house(joining(server)) as world:
        yield world


async def create(at: House, **fields: object) -> Body:
    return await ok(at, RESPONSES, {"input": "hi"} | fields)


async def read(at: House, path: str, method: str = "GET") -> tuple[int, Body]:
    status, reply, _ = await call(at, method, f"{RESPONSES}/{path}")
    return status, reply


async def refused(at: House, **fields: object) -> tuple[int, str | None]:
    return await refusal(at, RESPONSES, {"input": "hi"} | fields)


async def test_response_is_stored_as_it_was_sent(at: House) -> None:
    whole = await create(at)
    assert whole["store"] is True
    assert await read(at, whole["id"]) == (200, whole)
    streamed = (await events(at, store=True))[-1]["response"]
    assert await read(at, streamed["id"]) == (200, streamed)


async def test_response_without_store_is_not_found(at: House) -> None:
    whole = await create(at, store=False)
    assert whole["store"] is False
    status, reply = await read(at, whole["id"])
    assert (status, reply["error"]["code"]) == (404, "response_not_found")
    assert (await read(at, "resp_none", "DELETE"))[0] == 404
    assert (await read(at, "resp_none/input_items"))[0] == 404
    assert await refused(at, previous_response_id="resp_none") == (400, "previous_response_id")


async def test_conversation_continues_after_earlier_responses_are_deleted(at: House) -> None:
    first = await create(at, input="one", instructions="Be short.")
    second = await create(at, input="two", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    deleted = {"id": first["id"], "object": "response", "deleted": True}
    assert (await read(at, first["id"], "DELETE"))[1] == deleted
    assert (await read(at, first["id"]))[0] == 404
    await create(at, input="three", previous_response_id=second["id"], store=False)
    assert [(turn.role, turn.content) for turn in at.cluster.turns] == [
        ("user", "one"),
        ("assistant", TEXT),
        ("user", "two"),
        ("assistant", TEXT),
        ("user", "three"),
    ]


async def test_input_items_are_listed_in_pages(at: House) -> None:
    first = await create(at, input="one")
    second = await create(at, input="two", previous_response_id=first["id"])
    path = f"{second['id']}/input_items"
    data = (await read(at, path))[1]["data"]
    assert [item["role"] for item in data] == ["user", "assistant", "user"]
    assert data[0]["content"] == [{"type": "input_text", "text": "two"}]
    assert data[1] == first["output"][0]
    _, oldest = await read(at, f"{path}?limit=1&order=asc")
    assert (oldest["data"], oldest["has_more"]) == ([data[2]], True)
    _, rest = await read(at, f"{path}?after={data[0]['id']}")
    assert (rest["data"], rest["has_more"]) == (data[1:], False)
    for query in ("limit=0", "limit=x", "order=up", "after=msg_none"):
        status, reply = await read(at, f"{path}?{query}")
        assert (status, reply["error"]["param"]) == (400, query.partition("=")[0])


async def test_response_that_fails_is_stored_as_failed(at: House) -> None:
    at.cluster.row_error = WorkerLost("the worker is gone")
    failed = (await events(at, store=True))[-1]["response"]
    assert failed["status"] == "failed"
    assert await read(at, failed["id"]) == (200, failed)


async def test_openai_client_stores_reads_and_deletes(at: House) -> None:
    async with openai_client(at) as client:
        responses = client.responses
        created = await responses.create(model=MODEL, input="hi", metadata={"a": "b"})
        assert await responses.retrieve(created.id) == created
        listed = await responses.input_items.list(created.id)
        assert [item.type for item in listed.data] == ["message"]
        await responses.delete(created.id)


async def test_conversation_that_is_too_long_to_be_stored_is_a_413(server: NatsServer) -> None:
    config = msgspec.structs.replace(QUICK.responses, conversation_bytes_max=150)
    async with house(joining(server), responses=config) as at:
        assert await refused(at, input="x" * 60) == (413, "input")
        await create(at, input="x" * 60, store=False)


async def test_without_a_store_fields_that_need_it_are_refused() -> None:
    config = msgspec.structs.replace(QUICK.responses, store=False)
    async with house(responses=config) as at:
        assert (await create(at))["store"] is False
        assert await refused(at, store=True) == (400, "store")
        assert await refused(at, background=True) == (400, "background")
        assert await refused(at, previous_response_id="resp_1") == (400, "previous_response_id")
        assert (await read(at, "resp_1"))[0] == 404


async def test_without_a_durable_broker_only_store_false_is_served() -> None:
    async with house() as plain:
        assert (await refused(plain))[0] == 503
        await create(plain, store=False)
        await until(lambda: plain.cluster.open == set())


async def test_response_that_cannot_be_stored_at_its_end_has_failed(
    at: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put(_: KeyValueStore, *key: str, value: bytes) -> None:
        raise Unavailable(f"no room for {len(value)} bytes of {key[0]}")

    await create(at)
    monkeypatch.setattr(KeyValueStore, "put", put)
    assert (await refused(at))[0] == 503
    last = (await events(at, store=True))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["output"][0]["status"] == "completed"


def test_page_of_nothing_is_empty() -> None:
    page = page_of([], {})
    assert (page.data, page.first_id, page.has_more) == ([], None, False)


def test_record_of_an_earlier_version_is_read() -> None:
    """A record outlives the version that stored it: fields may be added, and none removed."""
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
