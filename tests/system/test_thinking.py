"""The tokens of a model's thinking are counted as the model has made them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from openai import AsyncOpenAI
from tests.system.stack import Stack, serving
from tests.system.thinker import MARKS, make_thinker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from openai.types import CompletionUsage

pytestmark = pytest.mark.system

ASKED: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
    "temperature": 0,
    "max_tokens": 6,
}
ON = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("thinker")
    make_thinker(folder)
    with serving("--model-path", str(folder), "--reasoning-parser", "qwen3") as running:
        yield running


@pytest.fixture
async def client(thinker: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


async def counted(client: AsyncOpenAI, **said: Any) -> tuple[int, int]:
    """Tokens of thinking and of all answers; whole and streamed agree."""
    whole = await client.chat.completions.create(**ASKED | said)
    stream = await client.chat.completions.create(
        **ASKED | said, stream=True, stream_options={"include_usage": True}
    )
    *_, last = [chunk async for chunk in stream]
    assert last.usage is not None
    assert whole.usage is not None
    assert _thought(last.usage) == _thought(whole.usage)
    return _thought(whole.usage), whole.usage.completion_tokens


def _thought(usage: CompletionUsage) -> int:
    assert usage.completion_tokens_details is not None
    return usage.completion_tokens_details.reasoning_tokens or 0


async def test_thinking_that_does_not_end_is_all_of_the_answer(client: AsyncOpenAI) -> None:
    assert await counted(client, **ON) == (6, 6)
    assert await counted(client, **ON, n=2) == (12, 12)


async def test_thinking_that_ends_is_counted_up_to_its_mark(client: AsyncOpenAI) -> None:
    listed: Any = await client.post("/tokenize", cast_to=object, body={"prompt": MARKS[1]})
    at_once = {str(listed["tokens"][-1]): 100.0}
    assert await counted(client, **ON, logit_bias=at_once) == (1, 6)
    assert await counted(client, **ON, n=3, logit_bias=at_once) == (3, 18)


async def test_an_answer_without_thinking_has_none(client: AsyncOpenAI) -> None:
    assert await counted(client) == (0, 6)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert (await counted(client, extra_body=off))[0] == 0


async def test_a_response_tells_it_too(client: AsyncOpenAI) -> None:
    response = await client.responses.create(
        model="default",
        input="What is 12 + 30?",
        temperature=0,
        extra_body={"chat_template_kwargs": {"enable_thinking": True}, "store": False},
    )
    assert response.usage is not None
    thought = response.usage.output_tokens_details.reasoning_tokens
    assert 0 < thought < response.usage.output_tokens
    assert response.output_text == "12 + 30 = 42."
