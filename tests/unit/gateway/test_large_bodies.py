"""Large bodies: refused by count with both numbers, or read without holding the event loop.

Nothing here is timed: what holds the loop is shown by what is read on it. The times are in the
benchmark `tests.bench.bodies`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.support.wait import until
from tests.unit.gateway.calls import (
    CHAT,
    COMPLETE,
    GENERATE,
    HI,
    MESSAGES,
    RESPONSES,
    Response,
    call,
    get,
    ok,
    post,
)
from tests.unit.gateway.cluster import MODEL, House, house
from tests.unit.gateway.keyed import bearer, key_of, keyed

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
PYTHON_TAGS = "<|python_tag|>" * 200_000
MANY_TURNS = f"messages: {MANY} entries"
KEYS = {f"{number:x}": 1 for number in range(60_000)}
MANY_KEYS = "60000 object keys; the limit is 16384"
PART = {"type": "text", "text": ""}
CHAT_BODY = {"messages": TURNS[:1]}
ENUM = {"name": "f", "parameters": {"enum": ["a"] * 500_000}}
HOSTILE = {
    "chat messages": (CHAT, {"messages": TURNS}, MANY_TURNS),
    "anthropic messages": (MESSAGES, {"max_tokens": 1, "messages": TURNS}, MANY_TURNS),
    "counted messages": (f"{MESSAGES}/count_tokens", {"messages": TURNS}, MANY_TURNS),
    "ollama messages": ("/api/chat", {"messages": TURNS}, MANY_TURNS),
    "tokenized messages": ("/tokenize", {"messages": TURNS}, MANY_TURNS),
    "response items": (RESPONSES, {"input": TURNS}, f"input: {MANY} entries"),
    "parts": (
        CHAT,
        {"messages": [{"role": "user", "content": [PART] * 200_000}]},
        "messages[0].content: 200000 entries",
    ),
    "unknown fields": (
        GENERATE,
        {"text": "a", **{f"{i:x}": 1 for i in range(700_000)}},
        "700000 unknown fields; at most 256 are allowed",
    ),
    "input ids": (
        GENERATE,
        {"input_ids": [1] * 4_100_000},
        "input_ids: 4100000 entries; the limit is 524288",
    ),
    "rows of ids": (GENERATE, {"input_ids": [[1] * 400_000] * 8}, "values; the limit is 600000"),
    "prompt ids": (
        COMPLETE,
        {"prompt": [1] * 4_000_000},
        "prompt: 4000000 entries; the limit is 524288",
    ),
    "tools": (
        CHAT,
        CHAT_BODY | {"tools": [{"type": "function"}] * 40_000},
        "tools: 40000 entries; the limit is 512",
    ),
    "schema": (
        CHAT,
        CHAT_BODY | {"tools": [{"type": "function", "function": ENUM}]},
        "tools: the value has",
    ),
    "names": (GENERATE, {"text": "a", "rid": ["a"] * 1_000_000}, "rid: 1000000 entries"),
    "variables of the template": (CHAT, CHAT_BODY | {"chat_template_kwargs": KEYS}, MANY_KEYS),
    "parameters of a processor": (
        GENERATE,
        {"text": "a", "sampling_params": {"custom_params": KEYS}},
        MANY_KEYS,
    ),
    "keys of tools": (
        CHAT,
        CHAT_BODY | {"tools": [dict.fromkeys(list(KEYS)[:500], 1)] * 200},
        "100000 object keys; the limit is 16384",
    ),
    "rows of ids to decode": (
        "/detokenize",
        {"tokens": [[1] * 60_000] * 8},
        "tokens: 480000 ids; the limit is 131072",
    ),
}


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


def threads_of(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[str]:
    """The names of the threads that call a function of a module from here on."""
    threads: list[str] = []
    function = getattr(module, name)

    def noted(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return function(*args, **options)

    monkeypatch.setattr(module, name, noted)
    return threads


@pytest.mark.parametrize("name", HOSTILE)
async def test_body_with_too_many_values_is_refused_with_both_numbers(
    at: House, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, body, text = HOSTILE[name]
    with reads_on_the_loop(monkeypatch) as sizes, caplog.at_level(logging.INFO):
        status, reply, _ = await post(at, path, msgspec.json.encode(body))
    assert status in (400, 413), reply
    assert text in str(reply)
    assert sizes == []
    assert at.cluster.encodes == at.cluster.submits == []
    assert [record.message for record in caplog.records].count("request rejected") == 1


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (
            "/parse_function_call",
            {"text": PYTHON_TAGS, "tools": [], "tool_call_parser": "llama3"},
            {"normal_text": PYTHON_TAGS, "calls": []},
        ),
        (
            "/separate_reasoning",
            {"text": f"<think>{'hm ' * 50_000}</think>Yes.", "reasoning_parser": "qwen3"},
            {"reasoning_text": ("hm " * 50_000)[:-1], "text": "Yes."},
        ),
    ],
    ids=["calls", "reasoning"],
)
async def test_long_output_is_parsed_in_the_child(
    at: House, path: str, body: Json, expected: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reads_on_the_loop(monkeypatch) as sizes:
        assert await ok(at, path, body) == expected
    assert sizes == []


@pytest.mark.parametrize("card", [None, PoolingCard(width=2)], ids=("generates", "embeds"))
async def test_every_route_has_the_same_status_for_a_large_body_as_for_a_small_one(
    at: House, card: PoolingCard | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """White space makes every example large; no route reads it on the loop."""
    compared = 0
    at.cluster.pooling = card
    at.cluster.script = ("{", "}")
    paths = (await get(at, "/openapi.json")).body["paths"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            for example in _examples(operation):
                small = msgspec.json.encode(example)
                large = small[:-1] + b" " * limits.LOOP_BYTES_MAX + small[-1:]
                with reads_on_the_loop(monkeypatch) as sizes:
                    statuses = [
                        (await call(at, method, path, body)).status for body in (small, large)
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
    "/remove_external_corpus",
    "/update_weight_version",
}


def _examples(operation: Json) -> list[Json]:
    content = operation.get("requestBody", {}).get("content", {})
    named = content.get("application/json", {}).get("examples", {})
    return [example["value"] for example in named.values()]


async def test_large_conversation_is_read_in_a_thread(
    at: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Python makes of an admitted body is made in a thread, beside the loop."""
    threads = threads_of(monkeypatch, reading, "parse_chat")
    turns = [{"role": "user", "content": "a"}] * MESSAGES_MAX
    status, reply, _ = await post(at, CHAT, {"model": MODEL, "messages": turns})
    # The toy's context is short; the tokenizers have seen all of it.
    assert (status, len(at.cluster.turns)) == (400, MESSAGES_MAX), reply
    assert threads
    assert all(name.startswith("read-body") for name in threads)


async def test_long_output_is_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    run_in_thread = BodyReader.run_in_thread

    async def noted(self: BodyReader, work: Any, tenant: str) -> Any:
        written.append(tenant)
        return await run_in_thread(self, work, tenant)

    monkeypatch.setattr(BodyReader, "run_in_thread", noted)
    long = "<|python_tag|>" * 1000
    async with house(tool_call_parser=ToolParser.LLAMA3) as at:
        at.cluster.script = ("a", long)
        reply = await ok(at, CHAT, {"messages": HI})
    assert reply["choices"][0]["message"]["content"] == "a" + long
    assert written


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
    """A text of 7 MB is no large number of values, so it is admitted, and read in the child."""
    with reads_on_the_loop(monkeypatch) as sizes:
        status, reply, _ = await post(at, GENERATE, {"text": "a b " * 1_800_000})
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
    chat, run = reading.parse_chat, ProcessPool.run

    def held(*args: Any, **options: Any) -> Any:
        begun.set()
        assert go.wait(20)
        return chat(*args, **options)

    async def noted(self: ProcessPool, job: bytes, **options: Any) -> bytearray:
        bodies.append(len(job))
        return await run(self, job, **options)

    monkeypatch.setattr(reading, "parse_chat", held)
    monkeypatch.setattr(ProcessPool, "run", noted)
    body = msgspec.json.encode({"messages": HI}) + b" " * limits.LOOP_BYTES_MAX
    one, other = bearer(key_of("one")), bearer(key_of("other"))
    access = keyed(tmp_path, {"one": {}, "other": {}})
    async with house(access=access) as at, asyncio.TaskGroup() as group:
        first = group.create_task(post(at, CHAT, body, **one))
        assert await asyncio.to_thread(begun.wait, 20)
        status, _, headers = await post(at, CHAT, body, **one)
        assert (status, headers["Retry-After"], len(bodies)) == (503, "1", 1)
        second = group.create_task(post(at, CHAT, body, **other))
        await until(lambda: len(bodies) == 2)
        go.set()
    for reply in (first.result(), second.result()):
        assert (reply.status, "Retry-After" in reply.headers) == (200, False)


async def test_items_are_counted_in_a_thread(at: House, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threads_of(monkeypatch, responses, "prepare_responses_request")
    await ok(at, f"{RESPONSES}/input_tokens", {"input": [{"role": "user", "content": "a"}] * 100})
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

    async with (
        house(access=keyed(tmp_path, {"a": {}, "b": {}})) as at,
        asyncio.TaskGroup() as group,
    ):

        async def send(tenant: str, body: bytes | AsyncIterator[bytes]) -> Response:
            return await post(at, "/tokenize", body, **bearer(key_of(tenant)))

        both = [group.create_task(send("a", slow())) for _ in range(2)]
        ended, going = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        (refused,), (kept,) = ended, going
        status, reply, _ = await refused
        assert (status, "the limit is 1000000" in str(reply)) == (503, True), reply
        for tenant in ("b", "a"):
            assert (await send(tenant, b'{"prompt": "hi"}')).status == 200
        go.set()
        # /tokenize has no field `text`: both were read to their ends.
        assert (await kept).status == 400
        assert (await send("a", b'{"text": "' + b"a " * 400_000 + b'"}')).status == 400
