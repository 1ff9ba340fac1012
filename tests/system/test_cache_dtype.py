"""A cache in eight bits, from SGLang's argument to the answers of an OpenAI client."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from tests.kernels.rows import ISAS
from tests.system.stack import Stack, serving
from tests.system.test_int8 import SUMS, ask

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built"),
]


@pytest.fixture(scope="module", params=["fp8_e4m3", "fp8_e5m2"])
def kept(request: pytest.FixtureRequest) -> Iterator[tuple[str, Stack]]:
    with serving("--kv-cache-dtype", request.param) as running:
        yield request.param, running


def test_the_plan_says_so_and_that_no_scales_were_found(kept: tuple[str, Stack]) -> None:
    dtype, stack = kept
    log = stack.log("worker-0")
    assert re.search(rf"cache_dtype +{dtype} +cache\.dtype", log)
    assert "no scales of keys and values: they are 1.0" in log


def test_greedy_answers_are_as_sane_as_with_whole_numbers(kept: tuple[str, Stack]) -> None:
    _, stack = kept
    # Twice: the second time, the beginning is found in the cache.
    for _ in range(2):
        right = [answer in ask(stack, question) for question, answer in SUMS.items()]
        assert sum(right) >= len(SUMS) - 1
