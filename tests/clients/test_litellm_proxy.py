"""litellm's proxy before the gateway: chats with tools and responses pass through it."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from openai import AsyncOpenAI, OpenAI
from tests.clients.conftest import MODEL, call, thinking_call
from tests.clients.programs import python_of, serving_on_loopback
from tests.clients.relay import answered_in_time, relay_to

from antiphon.supervisor.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.clients.conftest import ScriptedStack
    from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

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
    program = str(python_of("agents").parent / "litellm")
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


@pytest.mark.long
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
