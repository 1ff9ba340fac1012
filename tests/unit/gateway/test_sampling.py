"""Maximum output tokens, seeds, and default variables of the chat template."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.unit.gateway.calls import BODIES, CHAT, COMPLETE, HI, MESSAGES, RESPONSES, Body, ok, post
from tests.unit.gateway.cluster import House, house

from antiphon.config.model import ModelConfig
from antiphon.config.parsing import ReasoningParser
from antiphon.gateway.requests.generation_request import GenerationRequest, answer_tokens
from antiphon.wire.errors import InvalidRequest, PromptTooLong

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

CONTEXTS = {100, 400}


def ask(tokens_max: int | None = None, tokens_default: int | None = None) -> GenerationRequest:
    return GenerationRequest(
        api="test", model=None, tokens_max=tokens_max, tokens_default=tokens_default
    )


def test_max_tokens_is_bounded_by_the_largest_worker() -> None:
    assert answer_tokens(ask(390), prompt_tokens=10, contexts=CONTEXTS) == 390
    with pytest.raises(InvalidRequest, match="400 tokens"):
        answer_tokens(ask(391), prompt_tokens=10, contexts=CONTEXTS)


@pytest.mark.parametrize(
    ("tokens_max", "message"),
    [
        (
            391,
            "Requested token count exceeds the model's maximum context length of 400 tokens. You "
            "requested a total of 401 tokens: 10 tokens from the input messages and 391 tokens for "
            "the completion. With this input max_tokens is at most 390.",
        ),
        (
            5000,
            "max_tokens is too large: 5000. The model's context of 400 tokens leaves at most 390 "
            "tokens for the completion of an input of 10 tokens.",
        ),
    ],
)
def test_answer_that_does_not_fit_is_refused_with_both_numbers_and_the_limit(
    tokens_max: int, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        answer_tokens(ask(tokens_max), prompt_tokens=10, contexts=CONTEXTS)
    assert (caught.value.message, caught.value.param) == (message, "max_tokens")


@pytest.mark.parametrize(
    ("prompt_tokens", "default", "expected"),
    [(10, None, 90), (99, None, 1), (100, None, 300), (10, 16, 16), (95, 16, 5), (399, 16, 1)],
)
def test_default_of_max_tokens_fits_each_worker_that_fits_the_prompt(
    prompt_tokens: int, default: int | None, expected: int
) -> None:
    asked = ask(tokens_default=default)
    assert answer_tokens(asked, prompt_tokens=prompt_tokens, contexts=CONTEXTS) == expected


def test_prompt_beyond_the_largest_worker_is_too_long() -> None:
    with pytest.raises(PromptTooLong):
        answer_tokens(ask(), prompt_tokens=400, contexts=CONTEXTS)
    assert answer_tokens(ask(0), prompt_tokens=400, contexts=CONTEXTS) == 0


HOT = {"temperature": 1.5}


async def seeds(model: ModelConfig, *bodies: Mapping[str, object]) -> list[int]:
    """The seeds that a new gateway gives to these requests, one after the other."""
    async with house(model=model) as at:
        for body in bodies:
            await ok(at, COMPLETE, {"prompt": "once", **body})
        return [submit.sampling.seed for submit in at.cluster.submits]


async def test_random_seed_seeds_the_generator_and_not_every_request() -> None:
    first = await seeds(ModelConfig(random_seed=7), *[HOT] * 4)
    assert len(set(first)) == 4
    assert await seeds(ModelConfig(random_seed=7), *[HOT] * 4) == first
    assert not set(first) & set(await seeds(ModelConfig(random_seed=8), *[HOT] * 4))
    assert not set(first) & set(await seeds(ModelConfig(), *[HOT] * 4))


async def test_random_seed_draws_nothing_for_a_seeded_or_greedy_request() -> None:
    model = ModelConfig(random_seed=7)
    plain = await seeds(model, HOT, HOT)
    mixed = await seeds(model, {"seed": 3}, HOT, {"temperature": 0}, HOT)
    assert (mixed[0], mixed[1], mixed[3]) == (3, *plain)


async def test_deterministic_inference_gives_one_seed_to_all() -> None:
    model = ModelConfig(random_seed=42, deterministic=True)
    assert await seeds(model, *[HOT] * 3) == [42, 42, 42]


DEFAULTS = {"enable_thinking": False, "style": {"a": 1}}
TEMPLATED = {path: BODIES[path] for path in (CHAT, RESPONSES, MESSAGES, "/api/chat")} | {
    f"{RESPONSES}/input_tokens": {"input": "hi"},
    f"{MESSAGES}/count_tokens": {"messages": HI},
    "/v1/tokenize": {"messages": HI},
}


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house(
        chat_template_kwargs=json.dumps(DEFAULTS), reasoning_parser=ReasoningParser.QWEN3
    ) as world:
        yield world


async def options(at: House, path: str, body: Mapping[str, object]) -> Body:
    """The variables that the template of a request gets."""
    await ok(at, path, body)
    return at.cluster.template_options or {}


@pytest.mark.parametrize("path", TEMPLATED)
async def test_defaults_reach_the_template_in_every_api(at: House, path: str) -> None:
    assert await options(at, path, TEMPLATED[path]) == DEFAULTS


@pytest.mark.parametrize("path", [CHAT, "/v1/tokenize"])
async def test_variables_of_a_request_win_key_by_key(at: House, path: str) -> None:
    given = {"style": None, "more": [1]}
    found = await options(at, path, {"messages": HI, "chat_template_kwargs": given})
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
    ("variables", "after_thinking"),
    [({}, False), ({"enable_thinking": True}, True), ({"enable_thinking": None}, True)],
)
async def test_form_of_the_output_follows_a_default_that_turns_thinking_off(
    at: House, variables: Body, after_thinking: bool
) -> None:
    await post(at, CHAT, {"messages": HI, "regex": "[0-9]+", "chat_template_kwargs": variables})
    assert ("</think>" in at.cluster.grammar.text) == after_thinking
