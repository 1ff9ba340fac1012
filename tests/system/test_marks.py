"""A model with marks: thinking is counted by them, and gaps are filled where they say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.system.conftest import GAP_MARKS, MARKS, QUESTION

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types import CompletionUsage
    from tests.system.stack import Stack

pytestmark = pytest.mark.system

ASKED: dict[str, Any] = {
    "model": "default",
    "messages": QUESTION,
    "temperature": 0,
    "max_tokens": 6,
}
PROMPT, SUFFIX = "What is ", "? It is 42."
WRITTEN = f"<fim_prefix>{PROMPT}<fim_middle>{SUFFIX}<fim_suffix>"
ON = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}


@pytest.fixture
def stack(thinker: Stack) -> Stack:
    return thinker


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


def test_a_gap_is_filled_as_the_marks_say(stack: Stack) -> None:
    asked = {"temperature": 0, "max_tokens": 8, "return_token_ids": True}
    filled = stack.post("/v1/completions", asked | {"prompt": PROMPT, "suffix": SUFFIX})
    plain = stack.post("/v1/completions", asked | {"prompt": WRITTEN})
    assert filled["choices"] == plain["choices"]
    ids = filled["choices"][0]["prompt_token_ids"]
    alone = {"add_special_tokens": False}
    marks = [stack.post("/v1/tokenize", alone | {"prompt": mark})["tokens"] for mark in GAP_MARKS]
    assert [len(each) for each in marks] == [1, 1, 1]
    begin, end, middle = (ids.index(each) for (each,) in marks)
    assert begin < middle < end == len(ids) - 1


def test_ollamas_door_fills_the_same_gap(stack: Stack) -> None:
    asked = {"stream": False, "options": {"temperature": 0, "num_predict": 8}}
    filled = stack.post("/api/generate", asked | {"prompt": PROMPT, "suffix": SUFFIX})
    plain = stack.post("/api/generate", asked | {"prompt": WRITTEN, "raw": True})
    reported = ("response", "prompt_eval_count", "eval_count")
    assert [filled[name] for name in reported] == [plain[name] for name in reported]
