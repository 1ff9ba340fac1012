"""The OpenAPI document is what is decoded; bodies made from it, or spoilt, break nothing."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import aiohttp
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.core import NotSet
from schemathesis.core.result import Ok
from tests.support.nats import NatsServer
from tests.support.wait import until
from tests.unit.gateway.calls import Response, call, get, post
from tests.unit.gateway.cluster import House, house, joining

from antiphon.wire.tokenize import PoolingCard

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

Json = dict[str, Any]
Case = tuple[str, str, bytes | None]
"""Method, path and body."""

AT_ONCE = 8
POOLING = {
    *("/v1/embeddings", "/v1/classify", "/v1/rerank", "/encode", "/classify"),
    *("/api/embed", "/api/embeddings"),
}
"""What a model that generates refuses; see `test_pooling`."""
POOLERS = (
    PoolingCard(width=2, matryoshka=True),
    PoolingCard(scores=True, width=2, labels=("bad", "good")),
    PoolingCard(scores=True, width=1, labels=("LABEL_0",)),
)


POOLS = ("embeds", "classifies", "reranks")
REPLIES: dict[PoolingCard | None, set[str]] = {
    None: {
        *("/generate", "/open_session", "/model_info", "/server_info", "/v1/loads", "/v1/models"),
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/score"),
        *("/api/chat", "/api/generate", "/api/tags", "/api/show", "/v1/tokenize"),
        *("/v1/detokenize", "/parse_function_call", "/separate_reasoning", "/pause_generation"),
        *("/add_external_corpus", "/remove_external_corpus", "/list_external_corpora"),
    },
    POOLERS[0]: {"/encode", "/v1/embeddings", "/api/embed", "/api/embeddings"},
    POOLERS[1]: {"/classify", "/v1/classify"},
    POOLERS[2]: {"/v1/rerank", "/classify"},
}
"""Whose replies have to be among those that are checked."""


@asynccontextmanager
async def served(card: PoolingCard | None = None) -> AsyncGenerator[tuple[House, Json]]:
    """A gateway and its document; of a pooling model, with the paths of pooling."""
    async with NatsServer(durable=True) as server, house(joining(server)) as at:
        at.cluster.script = ("a", "b")
        at.cluster.pooling = card
        status, document, _ = await get(at, "/openapi.json")
        assert status == 200
        if card is not None:
            paths = document["paths"]
            document["paths"] = {path: paths[path] for path in paths if path in POOLING}
            at.cluster.vector = lambda _: [0.5] * card.width
        yield at, document


async def send(at: House, cases: Sequence[Case]) -> None:
    """Send cases, several at a time; none may be a server's error, hang, or leave anything open."""
    left = iter(cases)

    async def work(session: aiohttp.ClientSession) -> None:
        for method, path, body in left:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            async with (
                asyncio.timeout(20),
                session.request(method, at.url + path, data=body, headers=headers) as reply,
            ):
                text = await reply.read()
                assert reply.status < 500, (method, path, body, text)
                if reply.status >= 400:
                    error = json.loads(text)["error"]
                    assert error["message"] if isinstance(error, dict) else error

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work(session))
    driver = at.service.submission.driver  # pyright: ignore[reportPrivateUsage]
    await until(lambda: driver.open_count == 0 and not at.cluster.open)
    assert at.service.submission.idle


async def test_every_example_is_served() -> None:
    async with served() as (at, document):
        at.cluster.script = ("{", "}")
        count = 0
        for path, method, operation in operations(document):
            if path in POOLING:
                continue
            for body in examples(operation):
                count += 1
                reply = await send_example(at, method, path, body)
                assert reply.status == 200, (path, body, reply.body)
        assert count > 15


async def send_example(at: House, method: str, path: str, body: Json | None) -> Response:
    if path == "/close_session":
        await post(at, "/open_session", body)
    if path == "/remove_external_corpus":
        await post(at, "/add_external_corpus", {"documents": ["a"]} | (body or {}))
    return await call(at, method, path, body)


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def examples(operation: Json) -> list[Json]:
    content = operation.get("requestBody", {})
    body = content.get("content", {}).get("application/json", {})
    named = body.get("examples", {})
    return [example["value"] for example in named.values()]


@pytest.mark.parametrize("card", [None, *POOLERS], ids=("generates", *POOLS))
async def test_replies_match_the_document(card: PoolingCard | None) -> None:
    """Those to the examples, and to what is got without a body."""
    async with served(card) as (at, document):
        at.cluster.script = ("{", "}")
        checked: set[str] = set()
        for path, method, operation in operations(document):
            for body in examples(operation) if method != "get" else [None]:
                status, reply, headers = await send_example(at, method, path, body)
                if status == 200 and "application/json" in headers.get("Content-Type", ""):
                    validator(document, operation).validate(reply)
                    checked.add(path)
        assert checked >= REPLIES[card], sorted(REPLIES[card] - checked)


def validator(document: Json, operation: Json) -> jsonschema_rs.Draft202012Validator:
    content = operation["responses"]["200"]["content"]["application/json"]
    schema = content["schema"] | {"components": document["components"]}
    return jsonschema_rs.Draft202012Validator(schema)


async def test_every_operation_names_its_errors() -> None:
    async with served() as (_, document):
        for path, _, operation in operations(document):
            assert "default" in operation["responses"], path


def conforming(document: Json, count: int) -> list[Case]:
    """Cases that schemathesis makes from the document."""
    schema = schemathesis.openapi.from_dict(document)
    every = [each.ok() for each in schema.get_all_operations() if isinstance(each, Ok)]
    # One that takes nothing has one case, and is tried in no other way.
    share = 1 + 4 * count // (3 * sum(bool(len(each.body)) for each in every))
    cases: list[Case] = []
    for operation in every:

        @settings(
            max_examples=share,
            database=None,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=(
                HealthCheck.too_slow,
                HealthCheck.filter_too_much,
                HealthCheck.data_too_large,
                HealthCheck.large_base_example,
            ),
        )
        @given(case=operation.as_strategy())
        def collect(case: schemathesis.Case) -> None:
            body = case.body
            given_body = not isinstance(body, NotSet)
            query = "&".join(f"{k}={quote(str(v), safe='')}" for k, v in (case.query or {}).items())
            path = case.formatted_path + (f"?{query}" if query else "")
            cases.append((case.method, path, json.dumps(body).encode() if given_body else None))

        collect()
    return cases


async def conforming_bodies_break_nothing(count: int, card: PoolingCard | None = None) -> None:
    async with served(card) as (at, document):
        cases = await asyncio.to_thread(conforming, document, count)
        assert len(cases) >= count * 0.8
        await send(at, cases)


@pytest.mark.timeout(120)
async def test_bodies_made_from_the_document_break_nothing() -> None:
    await conforming_bodies_break_nothing(300)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("card", POOLERS, ids=POOLS)
async def test_bodies_break_nothing_of_a_model_that_pools(card: PoolingCard) -> None:
    await conforming_bodies_break_nothing(60, card)
    await spoilt_bodies_break_nothing(120, 4, card)


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_two_thousand_bodies_made_from_the_document_break_nothing() -> None:
    await conforming_bodies_break_nothing(2000)


VALUES = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 0.5, 1e308, "", "a", "\x00", "\ud800",
    "é" * 300, [], [[]], [None], ["a", 1], {}, {"a": {}}, {"type": "text"}, [1, 2, 3],
)  # fmt: skip


def spoilt(document: Json, count: int, seed: int) -> list[Case]:
    """Examples with a part changed, removed or added, and bytes that are no JSON."""
    rng = random.Random(seed)
    whole = [
        (method, path, body)
        for path, method, operation in operations(document)
        for body in examples(operation)
    ]
    schemas = document["components"]["schemas"]
    fields = (each.get("properties", {}) for each in schemas.values())
    names = sorted({name for properties in fields for name in properties})
    cases: list[Case] = []
    for _ in range(count):
        method, path, body = rng.choice(whole)
        changed = json.loads(json.dumps(body))
        for _ in range(rng.randint(1, 3)):
            _spoil(changed, names, rng)
        written = json.dumps(changed).encode()
        if rng.random() < 0.25:
            written = _garbled(written, rng)
        cases.append((method, path, written))
    return cases


def _spoil(body: Json, names: Sequence[str], rng: random.Random) -> None:
    value = json.loads(json.dumps(rng.choice(VALUES)))
    match rng.randrange(3):
        case 0 if body:
            name = rng.choice(sorted(body))
            inner = body[name]
            if isinstance(inner, dict) and rng.random() < 0.5:
                _spoil(inner, names, rng)
            elif isinstance(inner, list) and inner and rng.random() < 0.5:
                inner[rng.randrange(len(inner))] = value
            else:
                body[name] = value
        case 1 if body:
            del body[rng.choice(sorted(body))]
        case _:
            body[rng.choice(names)] = value


def _garbled(written: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(written) + 1)
    match rng.randrange(4):
        case 0:
            return written[:at]
        case 1:
            return written[:at] + bytes([rng.randrange(256)]) + written[at:]
        case 2:
            return b"[" * rng.randrange(1, 3000) + written
        case _:
            return rng.randbytes(rng.randrange(64))


async def spoilt_bodies_break_nothing(
    count: int, seed: int, card: PoolingCard | None = None
) -> None:
    async with served(card) as (at, document):
        await send(at, spoilt(document, count, seed))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [1, 2])
async def test_spoilt_bodies_break_nothing(seed: int) -> None:
    await spoilt_bodies_break_nothing(250, seed)


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_ten_thousand_spoilt_bodies_break_nothing() -> None:
    await spoilt_bodies_break_nothing(10_000, 3)
