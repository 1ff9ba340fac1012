"""Weights rounded to 8 bits, from the command line to the answers of an OpenAI client."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from openai import OpenAI
from tests.kernels.rows import ISAS
from tests.system.stack import Stack, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built"),
]

SUMS = {f"What is {a} + {b}?": str(a + b) for a, b in ((12, 30), (7, 8), (21, 45), (3, 60), (9, 9))}
COUNT = "Count from 1 to 9."


@pytest.fixture(scope="module", params=["int8", "int8_dynamic"])
def rounded(request: pytest.FixtureRequest) -> Iterator[tuple[str, Stack]]:
    with serving("--model-linear", request.param) as running:
        yield request.param, running


def ask(stack: Stack, question: str) -> str:
    with OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=stack.model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
        )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    return choice.message.content or ""


def test_the_plan_says_that_weights_are_rounded(rounded: tuple[str, Stack]) -> None:
    linear, stack = rounded
    assert re.search(rf"linear +{linear} +model\.linear", stack.log("worker-0"))


def test_greedy_answers_are_as_sane_as_with_whole_weights(rounded: tuple[str, Stack]) -> None:
    _, stack = rounded
    right = [answer in ask(stack, question) for question, answer in SUMS.items()]
    assert sum(right) >= len(SUMS) - 1
    assert [int(number) for number in re.findall(r"\d+", ask(stack, COUNT))] == list(range(1, 10))
