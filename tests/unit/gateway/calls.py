"""HTTP calls of a gateway under test, and what most tests read of their replies."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import openai
from tests.support.wait import until
from tests.unit.gateway.cluster import SCRIPT

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from multidict import CIMultiDictProxy
    from tests.unit.gateway.cluster import Address, House

Body = dict[str, Any]

TEXT = "".join(SCRIPT)
HI: list[Any] = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GENERATE = "/generate"
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "Rome"}}\n</tool_call>'
"""A call of a tool in the format of Hermes."""
BODIES: dict[str, Body] = {
    CHAT: {"messages": HI},
    COMPLETE: {"prompt": "hi"},
    RESPONSES: {"input": "hi", "store": False},
    MESSAGES: {"messages": HI, "max_tokens": 8},
    GENERATE: {"text": "hi"},
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "hi"},
}
"""The smallest body of every API that generates."""


class Response(NamedTuple):
    """A JSON body is decoded; another one is its text."""

    status: int
    body: Any
    headers: CIMultiDictProxy[str]


async def call(
    at: House | Address, method: str, path: str, body: object = None, **headers: str
) -> Response:
    """Send a body as JSON, unless it is bytes or comes in pieces of bytes, or is none."""
    if body is not None:
        headers = {"Content-Type": "application/json"} | headers
    if not isinstance(body, bytes | AsyncIterable | None):
        body = json.dumps(body).encode()
    data = io.BytesIO(body) if isinstance(body, bytes) else body
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, at.url + path, data=data, headers=headers) as reply,
    ):
        read = reply.json if reply.content_type == "application/json" else reply.text
        return Response(reply.status, await read(), reply.headers)


async def post(at: House | Address, path: str, body: object, **headers: str) -> Response:
    return await call(at, "POST", path, body, **headers)


async def get(at: House | Address, path: str, **headers: str) -> Response:
    return await call(at, "GET", path, **headers)


async def ok(at: House | Address, path: str, body: object, **headers: str) -> Any:
    """The body of the reply to a request that succeeds."""
    status, reply, _ = await post(at, path, body, **headers)
    assert status == 200, reply
    return reply


async def failure(at: House | Address, path: str, body: object, **headers: str) -> tuple[int, Body]:
    """The status and the error of a request that fails."""
    status, reply, _ = await post(at, path, body, **headers)
    assert status >= 400, reply
    return status, reply["error"]


async def refusal(
    at: House | Address, path: str, body: object, **headers: str
) -> tuple[int, str | None]:
    """The status of a request that fails, and the field that the error names."""
    status, found = await failure(at, path, body, **headers)
    return status, found["param"]


async def stream(at: House | Address, path: str, body: Body) -> list[str]:
    """The data of the events of a stream."""
    status, text, headers = await post(at, path, body | {"stream": True})
    assert status == 200, text
    assert headers["Content-Type"].startswith("text/event-stream")
    return [event.removeprefix("data: ") for event in text.split("\n\n") if event]


async def chunks(at: House | Address, path: str, body: Body) -> list[Body]:
    """The events of a stream that ends well."""
    *events, end = await stream(at, path, body)
    assert end == "[DONE]"
    return [json.loads(event) for event in events]


@asynccontextmanager
async def running_post(
    at: House, path: str, body: object, *, hold_at: int = 1, **headers: str
) -> AsyncGenerator[asyncio.Task[Response]]:
    """A request that has been submitted and is held before a step; it goes on after the block."""
    at.cluster.hold_at = hold_at
    before = len(at.cluster.submits)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(post(at, path, body, **headers))
        await until(lambda: len(at.cluster.submits) > before)
        yield task
        at.cluster.go.set()


def openai_client(at: House, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key=key, max_retries=0)
