"""Large bodies: refused by count with both numbers, or read without holding the event loop.

Nothing here is timed: what holds the loop is shown by what is read on it. The times are in the
benchmark `tests.bench.bodies`.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import msgspec
import pytest
from tests.support.wait import until
from tests.unit.gateway.cluster import MODEL, House, house
from tests.unit.gateway.keyed import key_of, keyed

from antiphon.config.parsing import ToolParser
from antiphon.gateway.http.core import body_reader, fields, limits
from antiphon.gateway.http.core.body_reader import BodyJob, BodyReader, BodyResult, run_job
from antiphon.gateway.http.native.parsing import ParseBody
from antiphon.gateway.http.openai import parse as reading
from antiphon.gateway.http.openai.responses import endpoints as responses
from antiphon.service.process_pool import ProcessPool
from antiphon.wire.codec import decode, encode
from antiphon.wire.errors import InvalidRequest, decode_error
from antiphon.wire.generate import IDS_MAX, TEXTS_MAX, EmbedRequest, GenerateRequest
from antiphon.wire.ids import ClientKey
from antiphon.wire.tokenize import MESSAGES_MAX, ChatMessage, PoolingCard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

Json = dict[str, Any]

MANY = 260_000
TURNS = [{"role": "user", "content": "a"}] * MANY
KEYS = {f"{number:x}": 1 for number in range(60_000)}
HOSTILE = {
    "chat messages": ("/v1/chat/completions", {"messages": TURNS}, "messages: 260000 entries"),
    "anthropic messages": (
        "/v1/messages",
        {"max_tokens": 1, "messages": TURNS},
        "messages: 260000 entries",
    ),
    "counted messages": (
        "/v1/messages/count_tokens",
        {"messages": TURNS},
        "messages: 260000 entries",
    ),
    "ollama messages": ("/api/chat", {"messages": TURNS}, "messages: 260000 entries"),
    "tokenized messages": ("/tokenize", {"messages": TURNS}, "messages: 260000 entries"),
    "response items": ("/v1/responses", {"input": TURNS}, "input: 260000 entries"),
    "parts": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 200_000}]},
        "messages[0].content: 200000 entries",
    ),
    "unknown fields": (
        "/generate",
        {"text": "a", **{f"{i:x}": 1 for i in range(700_000)}},
        "700000 unknown fields; at most 256 are allowed",
    ),
    "input ids": (
        "/generate",
        {"input_ids": [1] * 4_100_000},
        "input_ids: 4100000 entries; the limit is 524288",
    ),
    "rows of ids": (
        "/generate",
        {"input_ids": [[1] * 400_000] * 8},
        "values; the limit is 600000",
    ),
    "prompt ids": (
        "/v1/completions",
        {"prompt": [1] * 4_000_000},
        "prompt: 4000000 entries; the limit is 524288",
    ),
    "tools": (
        "/v1/chat/completions",
        {"messages": TURNS[:1], "tools": [{"type": "function"}] * 40_000},
        "tools: 40000 entries; the limit is 512",
    ),
    "schema": (
        "/v1/chat/completions",
        {
            "messages": TURNS[:1],
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"enum": ["a"] * 500_000}},
                }
            ],
        },
        "tools: the value has",
    ),
    "names": ("/generate", {"text": "a", "rid": ["a"] * 1_000_000}, "rid: 1000000 entries"),
    "variables of the template": (
        "/v1/chat/completions",
        {"messages": TURNS[:1], "chat_template_kwargs": KEYS},
        "60000 object keys; the limit is 16384",
    ),
    "parameters of a processor": (
        "/generate",
        {"text": "a", "sampling_params": {"custom_params": KEYS}},
        "60000 object keys; the limit is 16384",
    ),
    "keys of tools": (
        "/v1/chat/completions",
        {"messages": TURNS[:1], "tools": [dict.fromkeys(list(KEYS)[:500], 1)] * 200},
        "100000 object keys; the limit is 16384",
    ),
    "rows of ids to decode": (
        "/detokenize",
        {"tokens": [[1] * 60_000] * 8},
        "tokens: 480000 ids; the limit is 131072",
    ),
}


async def post(at: House, path: str, body: bytes) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            at.url + path, data=io.BytesIO(body), headers={"Content-Type": "application/json"}
        ) as got,
    ):
        return got.status, await got.text()


@contextmanager
def reads_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of the bodies whose raw fields are read in this process."""
    sizes: list[int] = []
    read = fields.read

    def noted(body: bytes, *rest: Any) -> Any:
        sizes.append(len(body))
        return read(body, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(body_reader.fields, "read", noted)
        yield sizes


@pytest.mark.parametrize("name", HOSTILE)
async def test_body_with_too_many_values_is_refused_with_both_numbers(
    at: House, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, body, text = HOSTILE[name]
    with reads_on_the_loop(monkeypatch) as sizes, caplog.at_level(logging.INFO):
        status, reply = await post(at, path, msgspec.json.encode(body))
    assert status in (400, 413), reply
    assert text in reply
    assert sizes == []
    assert at.cluster.encodes == at.cluster.submits == []
    lines = [record for record in caplog.records if record.message == "request rejected"]
    assert len(lines) == 1


async def test_calls_of_a_long_text_are_parsed_in_the_child(
    at: House,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "<|python_tag|>" * 200_000
    body = {"text": text, "tools": [], "tool_call_parser": "llama3"}
    with reads_on_the_loop(monkeypatch) as sizes:
        status, reply = await post(at, "/parse_function_call", json.dumps(body).encode())
    assert (status, json.loads(reply)) == (200, {"normal_text": text, "calls": []})
    assert sizes == []


async def test_thinking_of_a_long_text_is_parsed_in_the_child(
    at: House,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = {"text": f"<think>{'hm ' * 50_000}</think>Yes.", "reasoning_parser": "qwen3"}
    with reads_on_the_loop(monkeypatch) as sizes:
        status, reply = await post(at, "/separate_reasoning", json.dumps(body).encode())
    assert status == 200
    assert json.loads(reply) == {"reasoning_text": ("hm " * 50_000)[:-1], "text": "Yes."}
    assert sizes == []


@pytest.mark.parametrize("card", [None, PoolingCard(width=2)], ids=("generates", "embeds"))
async def test_every_route_answers_a_large_body_as_a_small_one(
    card: PoolingCard | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """White space makes every example large; no route reads it on the loop."""
    compared = 0
    async with house() as at, aiohttp.ClientSession() as session:
        at.cluster.pooling = card
        at.cluster.script = ("{", "}")
        async with session.get(f"{at.url}/openapi.json") as got:
            paths = cast("dict[str, Json]", (await got.json())["paths"])
        for path, methods in paths.items():
            for method, operation in methods.items():
                for example in _examples(operation):
                    small = msgspec.json.encode(example)
                    large = small[:-1] + b" " * limits.LOOP_BYTES_MAX + small[-1:]
                    with reads_on_the_loop(monkeypatch) as sizes:
                        statuses = [
                            await _status(session, method, at.url + path, body)
                            for body in (small, large)
                        ]
                    if statuses[1] == 413:  # of the routes that take names and switches
                        assert path in SMALL, path
                        continue
                    assert statuses[0] == statuses[1], (path, statuses)
                    assert all(size <= len(small) for size in sizes)
                    compared += 1
    assert compared > 20


SMALL = {
    "/abort_request",
    "/api/pull",
    "/api/show",
    "/close_session",
    "/configure_logging",
    "/continue_generation",
    "/open_session",
    "/pause_generation",
    "/update_weight_version",
}


def _examples(operation: Json) -> list[Json]:
    content = operation.get("requestBody", {}).get("content", {})
    named = content.get("application/json", {}).get("examples", {})
    return [example["value"] for example in named.values()]


async def _status(session: aiohttp.ClientSession, method: str, url: str, body: bytes) -> int:
    headers = {"Content-Type": "application/json"}
    async with session.request(method, url, data=body, headers=headers) as got:
        await got.read()
        return got.status


async def test_large_conversation_is_read_in_a_thread(
    at: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Python makes of a body that was let in is made in a thread, beside the loop."""
    threads: list[str] = []
    chat = reading.parse_chat

    def noted(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return chat(*args, **options)

    monkeypatch.setattr(reading, "parse_chat", noted)
    turns = [{"role": "user", "content": "a"}] * MESSAGES_MAX
    body = {"model": MODEL, "messages": turns}
    status, reply = await post(at, "/v1/chat/completions", json.dumps(body).encode())
    # The toy's context is short; the tokenizers have seen all of it.
    assert (status, len(at.cluster.encodes[-1].messages or ())) == (400, MESSAGES_MAX), reply
    assert threads
    assert all(name.startswith("read-body") for name in threads)


async def test_long_answer_is_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    apart = BodyReader.run_in_thread

    async def noted(self: BodyReader, work: Any, tenant: str) -> Any:
        threads.append("apart")
        return await apart(self, work, tenant)

    monkeypatch.setattr(BodyReader, "run_in_thread", noted)
    long = "<|python_tag|>" * 1000
    async with house(tool_call_parser=ToolParser.LLAMA3) as at:
        at.cluster.script = ("a", long)
        body = {"messages": [{"role": "user", "content": "hi"}]}
        status, reply = await post(at, "/v1/chat/completions", json.dumps(body).encode())
        assert status == 200
        assert json.loads(reply)["choices"][0]["message"]["content"] == "a" + long
    assert threads


def test_child_keeps_the_kind_of_an_error_and_its_field() -> None:
    job = BodyJob(f"{ParseBody.__module__}:{ParseBody.__qualname__}", "", b'{"text": 1}')
    done = msgspec.msgpack.decode(run_job(msgspec.msgpack.encode(job)), type=BodyResult)
    assert done.error is not None
    error = decode_error(done.error)
    assert (error.status, error.param) == (400, "text")


def test_body_with_few_values_is_small() -> None:
    assert limits.is_small(b'{"text": "' + b"a" * 200_000 + b'"}')
    assert not limits.is_small(b'{"text": "' + b"a" * limits.LOOP_BYTES_MAX + b'"}')
    assert not limits.is_small(b"[" + b"1," * limits.LOOP_VALUES_MAX + b"1]")


async def test_loop_is_held_by_no_part_of_a_large_text(
    at: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of 7 MB is no large number of values, so it is let in, and read in the child."""
    with reads_on_the_loop(monkeypatch) as sizes:
        status, reply = await post(
            at, "/generate", msgspec.json.encode({"text": "a b " * 1_800_000})
        )
    assert sizes == []
    assert (status, at.cluster.submits) == (413, []), reply  # no message of the bus holds it


@pytest.mark.parametrize("form", [encode, msgspec.json.encode], ids=("msgpack", "json"))
@pytest.mark.parametrize(
    ("message", "place"),
    [
        (
            GenerateRequest(
                key=ClientKey("k"),
                model=MODEL,
                messages=(ChatMessage(role="user", content="a"),) * (MESSAGES_MAX + 1),
            ),
            "messages",
        ),
        (
            GenerateRequest(key=ClientKey("k"), model=MODEL, prompt_ids=(1,) * (IDS_MAX + 1)),
            "prompt_ids",
        ),
        (EmbedRequest(model=MODEL, prompt_ids=((1,) * (IDS_MAX + 1),)), "prompt_ids"),
        (EmbedRequest(model=MODEL, texts=("a",) * (TEXTS_MAX + 1)), "texts"),
    ],
    ids=("messages", "ids", "rows to embed", "texts to embed"),
)
def test_message_of_a_client_with_too_many_values_is_refused(
    message: GenerateRequest | EmbedRequest, place: str, form: Callable[[object], bytes]
) -> None:
    with pytest.raises(InvalidRequest, match=rf"length <= \d+ - at `\$\.{place}"):
        decode(form(message), (GenerateRequest, EmbedRequest))


LARGE = msgspec.json.encode({"text": "a" * 300_000, "tools": [], "tool_call_parser": "hermes"})


async def test_reader_leaves_no_child_behind() -> None:
    async with BodyReader() as reader:
        await reader.read(LARGE, ParseBody, lambda read: read, "acme")
        assert len(reader.pool.pids) == 1
    assert reader.pool.pids == ()


@pytest.mark.parametrize("leaves", [False, True], ids=("stays", "leaves"))
async def test_thread_takes_tenants_in_turns(*, leaves: bool) -> None:
    """One tenant's work delays another's by one, whether or not its callers stay."""
    begun, go = threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        begun.set()
        assert go.wait(20)

    async with BodyReader() as reader, asyncio.TaskGroup() as group:
        held = group.create_task(reader.run_in_thread(first, "a"))
        await asyncio.to_thread(begun.wait, 20)
        for name in ("a1", "a2", "b1"):
            group.create_task(reader.run_in_thread(partial(order.append, name), name[0]))
        await asyncio.sleep(0)
        if leaves:
            held.cancel()
        go.set()
    assert order == ["a1", "b1", "a2"]


async def test_tenant_with_too_many_large_bodies_is_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another tenant's is read."""
    monkeypatch.setattr(body_reader, "_LARGE_MAX", 1)
    begun, go = threading.Event(), threading.Event()
    bodies: list[int] = []
    chat = reading.parse_chat

    def held(*args: Any, **options: Any) -> Any:
        begun.set()
        assert go.wait(20)
        return chat(*args, **options)

    run = ProcessPool.run

    async def noted(self: ProcessPool, job: bytes, **options: Any) -> bytes:
        bodies.append(len(job))
        return await run(self, job, **options)

    monkeypatch.setattr(reading, "parse_chat", held)
    monkeypatch.setattr(ProcessPool, "run", noted)
    body = msgspec.json.encode({"messages": [{"role": "user", "content": "hi"}]})
    body += b" " * limits.LOOP_BYTES_MAX
    path = "/v1/chat/completions"
    async with house(access=keyed(tmp_path, {"one": {}, "other": {}})) as at:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(_keyed_post(at, path, body, "one"))
            assert await asyncio.to_thread(begun.wait, 20)
            status, retry_after = await _keyed_post(at, path, body, "one")
            assert (status, retry_after, len(bodies)) == (503, "1", 1)
            other = group.create_task(_keyed_post(at, path, body, "other"))
            await until(lambda: len(bodies) == 2)
            go.set()
        assert first.result() == other.result() == (200, None)


async def _keyed_post(at: House, path: str, body: bytes, tenant: str) -> tuple[int, str | None]:
    headers = {"Authorization": f"Bearer {key_of(tenant)}", "Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(at.url + path, data=body) as got,
    ):
        await got.read()
        return got.status, got.headers.get("Retry-After")


async def test_items_are_counted_in_a_thread(at: House, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    asked = responses.prepare_responses_request

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return asked(*args)

    monkeypatch.setattr(responses, "prepare_responses_request", noted)
    body = msgspec.json.encode({"input": [{"role": "user", "content": "a"}] * 100})
    status, reply = await post(at, "/v1/responses/input_tokens", body)
    assert status == 200, reply
    assert [name.startswith("read-body") for name in threads] == [True]


async def test_bodies_that_arrive_slowly_hold_bounded_memory_of_each_tenant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(body_reader, "_ARRIVING_BYTES_MAX", 1_000_000)
    go = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b'{"text": "' + b"a " * 300_000
        await go.wait()
        yield b'"}'

    async def send(at: House, tenant: str, body: bytes | AsyncIterator[bytes]) -> tuple[int, str]:
        headers = {
            "Authorization": f"Bearer {key_of(tenant)}",
            "Content-Type": "application/json",
        }
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(at.url + "/tokenize", data=body) as got,
        ):
            return got.status, await got.text()

    async with (
        house(access=keyed(tmp_path, {"a": {}, "b": {}})) as at,
        asyncio.TaskGroup() as group,
    ):
        both = [group.create_task(send(at, "a", slow())) for _ in range(2)]
        ended, going = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        (refused,), (kept,) = ended, going
        status, said = await refused
        assert (status, "the limit is 1000000" in said) == (503, True), said
        assert (await send(at, "b", b'{"prompt": "hi"}'))[0] == 200
        assert (await send(at, "a", b'{"prompt": "hi"}'))[0] == 200
        go.set()
        # /tokenize has no field `text`: both were read to their ends.
        assert (await kept)[0] == 400
        assert (await send(at, "a", b'{"text": "' + b"a " * 400_000 + b'"}'))[0] == 400
