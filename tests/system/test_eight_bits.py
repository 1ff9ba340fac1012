"""Weights and a cache in eight bits, from arguments to the answers of an OpenAI client."""

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


@pytest.fixture(
    scope="module",
    params=[
        ("int8", "fp8_e4m3"),
        pytest.param(("int8_dynamic", "fp8_e5m2"), marks=pytest.mark.long),
    ],
    ids=str,
)
def rounded(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, Stack]]:
    linear, dtype = request.param
    with serving("--model-linear", linear, "--kv-cache-dtype", dtype) as running:
        yield linear, dtype, running


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


def test_the_plan_names_both_formats_and_that_no_scales_were_found(
    rounded: tuple[str, str, Stack],
) -> None:
    linear, dtype, stack = rounded
    log = stack.log("worker-0")
    assert re.search(rf"linear +{linear} +model\.linear", log)
    assert re.search(rf"cache_dtype +{dtype} +cache\.dtype", log)
    assert "no scales of keys and values: they are 1.0" in log


def test_greedy_answers_are_as_sane_as_with_whole_numbers(rounded: tuple[str, str, Stack]) -> None:
    _, _, stack = rounded
    # Twice: the second time, the beginning is found in the cache.
    for _ in range(2):
        right = [answer in ask(stack, question) for question, answer in SUMS.items()]
        assert sum(right) >= len(SUMS) - 1
    assert [int(number) for number in re.findall(r"\d+", ask(stack, COUNT))] == list(range(1, 10))
