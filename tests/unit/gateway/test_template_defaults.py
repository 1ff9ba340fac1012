"""Default variables of the chat template: in every API, below those of the request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.unit.gateway.cluster import House, house
from tests.unit.gateway.test_http import CHAT, HI, post

from antiphon.config.parsing import ReasoningParser

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

Body = dict[str, object]
DEFAULTS = {"enable_thinking": False, "style": {"a": 1}}
EVERY = [
    (CHAT, {"messages": HI}),
    ("/v1/responses", {"input": "hi", "store": False}),
    ("/v1/responses/input_tokens", {"input": "hi"}),
    ("/v1/messages", {"messages": HI, "max_tokens": 4}),
    ("/v1/messages/count_tokens", {"messages": HI}),
    ("/api/chat", {"messages": HI, "model": "toy", "stream": False}),
    ("/v1/tokenize", {"messages": HI}),
]


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house(
        chat_template_kwargs=json.dumps(DEFAULTS), reasoning_parser=ReasoningParser.QWEN3
    ) as world:
        yield world


async def options(at: House, path: str, body: Mapping[str, object]) -> Body:
    """The variables that the template of a request gets."""
    status, reply, _ = await post(at, path, body)
    assert status == 200, reply
    return json.loads(at.cluster.encodes[-1].template.options or "{}")


@pytest.mark.parametrize(("path", "body"), EVERY, ids=[path for path, _ in EVERY])
async def test_defaults_reach_the_template_in_every_api(at: House, path: str, body: Body) -> None:
    assert await options(at, path, body) == DEFAULTS


@pytest.mark.parametrize("path", [CHAT, "/v1/tokenize"])
async def test_variables_of_a_request_win_key_by_key(at: House, path: str) -> None:
    said = {"style": None, "more": [1]}
    found = await options(at, path, {"messages": HI, "chat_template_kwargs": said})
    assert found == {"enable_thinking": False, "style": None, "more": [1]}


async def test_thinking_that_a_request_turns_on_wins(at: House) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    at.cluster.words = {"<think>": 1, "</think>": 2}
    body = {"messages": HI, "max_tokens": 2048, "thinking": thinking}
    found = await options(at, "/v1/messages", body)
    assert found == {"enable_thinking": True, "thinking": True, "style": {"a": 1}}


async def test_prompt_without_a_template_gets_no_variables(at: House) -> None:
    assert await options(at, "/v1/completions", {"prompt": "hi"}) == {}


@pytest.mark.parametrize(
    ("said", "behind_thinking"),
    [({}, False), ({"enable_thinking": True}, True), ({"enable_thinking": None}, True)],
)
async def test_form_of_an_answer_follows_a_default_that_turns_thinking_off(
    at: House, said: Body, behind_thinking: bool
) -> None:
    await post(at, CHAT, {"messages": HI, "regex": "[0-9]+", "chat_template_kwargs": said})
    grammar = at.cluster.submits[0].sampling.grammar
    assert grammar is not None
    assert ("</think>" in grammar.text) == behind_thinking
