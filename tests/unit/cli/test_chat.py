"""`antiphon chat` against a real HTTP server that speaks as the gateway does."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest
from aiohttp import web

from antiphon.cli.chat import (
    ChatFailed,
    ChatOptions,
    ChatRequest,
    ChatTurn,
    complete,
    first_model,
    server_url,
)
from antiphon.config.errors import ConfigError
from antiphon.service.web import web_server
from antiphon.supervisor.ports import free_port

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncGenerator, AsyncIterator

DEADLINE_S = 15


class Server:
    """Answers each request with `answer`, event by event; `hangs` keeps the stream open."""

    def __init__(self) -> None:
        self.answer = [chunk("Good "), chunk("day."), "[DONE]"]
        self.hangs = False
        self.asked: list[ChatRequest] = []
        self.left = asyncio.Event()
        self.url = ""

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "small", "object": "model"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        ask = msgspec.json.decode(await request.read(), type=ChatRequest)
        self.asked.append(ask)
        if ask.model != "small":
            body = {"error": {"message": f"no model {ask.model}", "type": "invalid_request_error"}}
            return web.json_response(body, status=404)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for data in self.answer:
            await response.write(f"data: {data}\n\n".encode())
        if self.hangs:
            try:
                await asyncio.sleep(DEADLINE_S)
            finally:
                self.left.set()
        return response


def chunk(text: str) -> str:
    return msgspec.json.encode({"choices": [{"index": 0, "delta": {"content": text}}]}).decode()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/chat/completions", server.chat)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    async with web_server(runner, "127.0.0.1", 0) as port:
        server.url = f"http://127.0.0.1:{port}"
        yield server


def ask(text: str, model: str = "small") -> ChatRequest:
    return ChatRequest(model=model, messages=(ChatTurn("user", text),), stream=True)


async def answer(server: Server, model: str = "small") -> str:
    received: list[str] = []
    await complete(ChatOptions(url=server.url), ask("hello", model), received.append)
    return "".join(received)


async def test_answer_is_what_was_streamed(server: Server) -> None:
    assert await first_model(ChatOptions(url=server.url)) == "small"
    assert await answer(server) == "Good day."


async def test_events_that_say_nothing_are_passed_over(server: Server) -> None:
    role = '{"choices": [{"delta": {"role": "assistant", "content": null}}]}'
    usage = '{"choices": [], "usage": {"total_tokens": 3}}'
    server.answer = [role, chunk("Hi"), usage, "[DONE]"]
    assert await answer(server) == "Hi"


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([chunk("Go")], "incomplete response"),
        ([chunk("Go"), '{"error": {"message": "worker lost"}}'], "server error: worker lost"),
        (["?"], "sent an invalid response"),
    ],
)
async def test_broken_answer_is_an_error(server: Server, events: list[str], message: str) -> None:
    server.answer = events
    with pytest.raises(ChatFailed, match=message):
        await answer(server)


async def test_refusal_gives_the_reason_of_the_server(server: Server) -> None:
    with pytest.raises(ChatFailed, match=r"rejected the request \(404\): no model large"):
        await answer(server, model="large")


async def test_cancelled_answer_closes_the_connection(server: Server) -> None:
    server.hangs, server.answer = True, [chunk("Go")]
    received = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        task = group.create_task(
            complete(ChatOptions(url=server.url), ask("hello"), lambda _: received.set())
        )
        await received.wait()
        task.cancel()
        await server.left.wait()


def in_foreground() -> None:
    """Ctrl-C is ignored by what a shell runs in the background, as it may run these tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@asynccontextmanager
async def chat(*arguments: str) -> AsyncGenerator[Process]:
    """Run the command as a user does; it is killed if the test leaves it running."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "antiphon.cli.main", "chat", *arguments,
        stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=in_foreground,
    )  # fmt: skip
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_one_message_prints_the_answer_and_leaves(server: Server) -> None:
    options = ("--max-tokens", "5", "--temperature", "0", "--system", "Be kind.")
    async with chat("--url", server.url, "--message", "hello", *options) as process:
        out, err = await process.communicate()
    assert (out.decode(), err.decode(), process.returncode) == ("Good day.\n", "", 0)
    asked = server.asked[0]
    assert asked.messages == (ChatTurn("system", "Be kind."), ChatTurn("user", "hello"))
    assert (asked.stream, asked.max_tokens, asked.temperature) == (True, 5, 0)


async def test_conversation_remembers_until_it_is_reset(server: Server) -> None:
    async with chat("--url", server.url) as process:
        out, _ = await process.communicate(b"one\n\ntwo\n/what\n/help\n/reset\nthree\n/exit\n")
    assert process.returncode == 0
    assert b"small at http://" in out
    assert b"unknown command" in out
    first, second, third = (ask.messages for ask in server.asked)
    assert first == (ChatTurn("user", "one"),)
    assert second == (
        ChatTurn("user", "one"),
        ChatTurn("assistant", "Good day."),
        ChatTurn("user", "two"),
    )
    assert third == (ChatTurn("user", "three"),)


async def test_ctrl_c_stops_the_answer_and_not_the_conversation(server: Server) -> None:
    server.hangs, server.answer = True, [chunk("Go")]
    async with chat("--url", server.url) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"one\n")
        await process.stdout.readuntil(b"Go")
        process.send_signal(signal.SIGINT)
        await server.left.wait()
        server.hangs, server.answer = False, [chunk("On."), "[DONE]"]
        out, err = await process.communicate(b"two\n/exit\n")
    assert process.returncode == 0, err
    assert b"stopped" in out
    assert server.asked[1].messages == (
        ChatTurn("user", "one"),
        ChatTurn("assistant", "Go"),
        ChatTurn("user", "two"),
    )


async def test_missing_server_error_has_the_start_command() -> None:
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    async with chat("--url", url, "--message", "hello") as process:
        _, err = await process.communicate()
    expected = f"antiphon chat: no server responds at {url}; start one with: antiphon serve\n"
    assert (err.decode(), process.returncode) == (expected, 1)


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("127.0.0.1:31200", "http://127.0.0.1:31200"),
        ("http://127.0.0.1:31200/v1", "http://127.0.0.1:31200"),
        ("http://127.0.0.1:31200/v1/", "http://127.0.0.1:31200"),
        ("https://a.example/llm/v1", "https://a.example/llm"),
    ],
)
def test_url_is_read_as_it_is_typed(typed: str, url: str) -> None:
    assert server_url(typed) == url


@pytest.mark.parametrize(
    "typed", ["", "ftp://a", "http://", "http:// a", "::bad", ":30000", "a:b", "a:99999", "[::1"]
)
def test_url_that_is_none_is_refused_with_an_example(typed: str) -> None:
    with pytest.raises(ConfigError, match="such as http://127"):
        server_url(typed)
