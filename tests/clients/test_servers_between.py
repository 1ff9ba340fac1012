"""Servers between a client and the gateway, in the long run: litellm's proxy and Open WebUI.

Installing them takes minutes, and their APIs are those of other clients here.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from openai import AsyncOpenAI, OpenAI
from tests.clients.conftest import MODEL, ScriptedStack, call, thinking_call
from tests.clients.programs import python_of, serving_on_loopback
from tests.clients.relay import answered_in_time, relay_to

from antiphon.supervisor.ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(900)]

KEY = "sk-proxy"
MEASURED = "it has 21 degrees"
ANSWER = "It has 21 degrees in Oslo."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "measure", "description": "Measure a city.", "parameters": SCHEMA}


@contextmanager
def litellm_proxy(url: str, folder: Path) -> Iterator[str]:
    """Run a proxy before the server at `url`; give its own URL."""
    parameters = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    models = [{"model_name": "proxied", "litellm_params": parameters}]
    (folder / "config.yaml").write_text(json.dumps({"model_list": models}))
    port = free_port("127.0.0.1")
    program = str(python_of("long").parent / "litellm")
    with serving_on_loopback(
        [program, "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)],
        folder=folder,
        environment={
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_MASTER_KEY": KEY,
            "LITELLM_TELEMETRY": "False",
        },
        health_url=f"http://127.0.0.1:{port}/health/liveliness",
    ):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def proxy(scripted: ScriptedStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    with (
        litellm_proxy(scripted.url, tmp_path_factory.mktemp("litellm")) as url,
        OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        yield client


def test_litellm_proxy_passes_a_streamed_call_and_its_result(
    scripted: ScriptedStack, proxy: OpenAI
) -> None:
    scripted.script((MEASURED, ANSWER), ("", call("measure", {"city": "Oslo"})))
    messages: list[Any] = [{"role": "user", "content": "How warm is it in Oslo?"}]
    tools: list[Any] = [{"type": "function", "function": FUNCTION}]
    with proxy.chat.completions.stream(model="proxied", messages=messages, tools=tools) as stream:
        message = stream.get_final_completion().choices[0].message
    [made] = message.tool_calls or []
    assert (made.function.name, made.function.arguments) == ("measure", '{"city": "Oslo"}')
    result = {"role": "tool", "tool_call_id": made.id, "content": MEASURED}
    messages += [message.model_dump(exclude_none=True, exclude={"parsed"}), result]
    whole = proxy.chat.completions.create(model="proxied", messages=messages, tools=tools)
    assert whole.choices[0].message.content == ANSWER


def test_litellm_proxy_passes_a_response_with_encrypted_reasoning_on(
    scripted: ScriptedStack, proxy: OpenAI
) -> None:
    scripted.script((MEASURED, ANSWER), ("", thinking_call("measure", {"city": "Oslo"})))
    tools: list[Any] = [{"type": "function", "strict": False, **FUNCTION}]
    asked: list[Any] = [
        {"role": "developer", "content": "Measure before you answer."},
        {"role": "user", "content": "How warm is it in Oslo?"},
    ]
    first = proxy.responses.create(
        model="proxied",
        input=asked,
        tools=tools,
        store=False,
        include=["reasoning.encrypted_content"],
    )
    [made] = [item for item in first.output if item.type == "function_call"]
    assert json.loads(made.arguments) == {"city": "Oslo"}
    result = {"type": "function_call_output", "call_id": made.call_id, "output": MEASURED}
    asked += [item.model_dump(exclude_none=True) for item in first.output] + [result]
    second = proxy.responses.create(model="proxied", input=asked, tools=tools, store=False)
    assert second.output_text == ANSWER


async def test_litellm_proxy_is_answered_in_time_by_the_embedded_model(
    engine: Stack, tmp_path: Path
) -> None:
    async with relay_to(engine.url) as relay, AsyncExitStack() as stack:
        # The relay runs in this thread's loop, and the proxy may ask it before it is ready.
        proxy = litellm_proxy(relay.url, tmp_path)
        url = await asyncio.to_thread(proxy.__enter__)
        stack.callback(proxy.__exit__, None, None, None)
        client = await stack.enter_async_context(
            AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        )
        asked: list[Any] = [{"role": "user", "content": "What is 17 + 25?"}]
        stream = await client.chat.completions.create(
            model="proxied", messages=asked, stream=True, temperature=0.0
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        first = await answered_in_time(relay, "/v1/chat/completions")
    assert "42" in text
    assert first.body.endswith(b"data: [DONE]\n\n")


ABOUT_OSLO = "Oslo is cold, and it is light for long in June."
MODELS = {"openai": MODEL, "ollama": f"{MODEL}:latest"}
"""What its page calls the model, by the API that it asks for it."""
QUIET = {
    "ANONYMIZED_TELEMETRY": "False",
    "BYPASS_EMBEDDING_AND_RETRIEVAL": "True",
    "DO_NOT_TRACK": "1",
    "ENABLE_OLLAMA_API": "True",
    "ENABLE_OPENAI_API": "True",
    "HF_HUB_OFFLINE": "1",
    "OFFLINE_MODE": "True",
    "SCARF_NO_ANALYTICS": "true",
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "secret",
}


@dataclass(frozen=True)
class WebUi:
    """A session of its page, and what it calls the model."""

    session: aiohttp.ClientSession
    model: str

    async def chat(self, **body: Any) -> list[dict[str, Any]]:
        """Send a chat as the page does; return the deltas."""
        asked = {"model": self.model, "stream": True, **body}
        async with self.session.post("/api/chat/completions", json=asked) as answer:
            assert answer.status == 200, await answer.text()
            lines = (await answer.text()).splitlines()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        chunks = [json.loads(event) for event in events]
        return [choice["delta"] for chunk in chunks for choice in chunk.get("choices", [])]


@contextmanager
def open_webui_server(url: str, folder: Path) -> Iterator[str]:
    """Run Open WebUI before the server at `url`; give its own URL."""
    port = free_port("127.0.0.1")
    backends = {
        "OLLAMA_BASE_URL": url,
        "OPENAI_API_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "DATA_DIR": str(folder / "data"),
    }
    program = str(python_of("open-webui").parent / "open-webui")
    with serving_on_loopback(
        [program, "serve", "--host", "127.0.0.1", "--port", str(port)],
        folder=folder,
        environment=QUIET | backends,
        health_url=f"http://127.0.0.1:{port}/health",
    ):
        yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def sign_in(url: str, api: str) -> AsyncIterator[WebUi]:
    """Sign in as the page does; the served model is listed alone, once for each API."""
    async with aiohttp.ClientSession(url) as session:
        anonymous = {"email": "", "password": ""}
        async with session.post("/api/v1/auths/signin", json=anonymous) as answer:
            token = (await answer.json())["token"]
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(url, headers=headers) as session:
        async with session.get("/api/models") as answer:
            listed = (await answer.json())["data"]
        names = [model["id"] for model in listed if "arena" not in model["id"]]
        assert sorted(names) == sorted(MODELS.values())
        yield WebUi(session, MODELS[api])


@pytest.fixture(scope="module")
def open_webui(scripted: ScriptedStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with open_webui_server(scripted.url, tmp_path_factory.mktemp("open-webui")) as url:
        yield url


@pytest.fixture(params=sorted(MODELS))
async def signed_in(request: pytest.FixtureRequest, open_webui: str) -> AsyncIterator[WebUi]:
    async with sign_in(open_webui, request.param) as page:
        yield page


async def test_open_webui_streams_a_chat(scripted: ScriptedStack, signed_in: WebUi) -> None:
    scripted.script(("", ABOUT_OSLO))
    deltas = await signed_in.chat(messages=[{"role": "user", "content": "What is Oslo like?"}])
    assert "".join(delta.get("content") or "" for delta in deltas) == ABOUT_OSLO


async def test_open_webui_streams_a_call(scripted: ScriptedStack, signed_in: WebUi) -> None:
    scripted.script(("", call("measure", {"city": "Oslo"})))
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "measure", "parameters": schema}}
    asked = [{"role": "user", "content": "How warm is it in Oslo?"}]
    deltas = await signed_in.chat(messages=asked, tools=[tool])
    calls = [part["function"] for delta in deltas for part in delta.get("tool_calls") or []]
    assert "".join(part.get("name") or "" for part in calls) == "measure"
    assert json.loads("".join(part.get("arguments") or "" for part in calls)) == {"city": "Oslo"}


@pytest.mark.parametrize(
    ("api", "path"), [("openai", "/v1/chat/completions"), ("ollama", "/api/chat")]
)
async def test_open_webui_is_answered_in_time_by_the_embedded_model(
    api: str, path: str, engine: Stack, tmp_path: Path
) -> None:
    async with relay_to(engine.url) as relay, AsyncExitStack() as stack:
        # The relay runs in this thread's loop, and the server may ask it before it is ready.
        server = open_webui_server(relay.url, tmp_path)
        url = await asyncio.to_thread(server.__enter__)
        stack.callback(server.__exit__, None, None, None)
        page = await stack.enter_async_context(sign_in(url, api))
        asked = [{"role": "user", "content": "What is 17 + 25?"}]
        deltas = await page.chat(messages=asked, temperature=0.0)
        await answered_in_time(relay, path)
    assert "42" in "".join(delta.get("content") or "" for delta in deltas)
