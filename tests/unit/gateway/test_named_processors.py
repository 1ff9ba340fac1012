"""Logit processors by name over HTTP: SGLang's two fields, and never its code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.unit.gateway.calls import BODIES, CHAT, COMPLETE, GENERATE, RESPONSES, Body, ok, refusal

from antiphon.wire.codec import pack_ids
from antiphon.wire.sampling import (
    AllowRange,
    AllowTokens,
    DisallowTokens,
    LogitProcessor,
    ThinkingBudget,
)

if TYPE_CHECKING:
    from tests.unit.gateway.cluster import House

PATHS = (CHAT, COMPLETE, RESPONSES, GENERATE)
BUDGET = {"tokens_max": 2, "begin_id": 1, "closing_ids": [2]}
NAMED = [
    ("disallow_tokens", {"token_ids": [1, 2]}, DisallowTokens(token_ids=(1, 2))),
    ("allow_tokens", {"token_ids": [3]}, AllowTokens(token_ids=(3,))),
    ("allow_range", {"first": 1, "last": 3}, AllowRange(first=1, last=3)),
    ("thinking_budget", BUDGET, ThinkingBudget(tokens_max=2, begin_id=1, closing_ids=(2,))),
]


def body_of(path: str, name: object, params: object) -> Body:
    """The fields at the place where this API has them."""
    custom = {"custom_params": params}
    inside = {"sampling_params": custom} if path == GENERATE else custom
    return BODIES[path] | {"custom_logit_processor": name} | inside


@pytest.mark.parametrize(("name", "params", "processor"), NAMED)
@pytest.mark.parametrize("path", PATHS)
async def test_registered_name_is_the_processor_of_the_worker(
    at: House, path: str, name: str, params: object, processor: LogitProcessor
) -> None:
    await ok(at, path, body_of(path, name, params))
    (submit,) = at.cluster.submits
    assert submit.sampling.processors == (processor,)


@pytest.mark.parametrize("path", PATHS)
async def test_unknown_processor_or_parameter_is_refused_by_its_field(at: House, path: str) -> None:
    field = "sampling_params.custom_params" if path == GENERATE else "custom_params"
    for name, params, param in (
        ('{"callable": "8004"}', {}, "custom_logit_processor"),
        ("allow_nothing", {}, "custom_logit_processor"),
        (None, {"token_ids": [1]}, field),
        ("", {"token_ids": [1]}, field),
        ("allow_tokens", None, f"{field}.token_ids"),
        ("allow_tokens", {"token_ids": []}, f"{field}.token_ids"),
        ("allow_tokens", {"token_ids": "1"}, f"{field}.token_ids"),
        ("allow_tokens", {"token_ids": [2**31]}, f"{field}.token_ids[0]"),
        ("allow_tokens", {"token_ids": [2**31 - 1]}, field),  # beyond the vocabulary
        ("allow_range", {"first": 3, "last": 2}, field),
        ("thinking_budget", BUDGET | {"tokens_max": 2**64}, f"{field}.tokens_max"),
        ("allow_tokens", {"token_ids": [1], "ids": [2]}, f"{field}.ids"),
        ("allow_tokens", {"token_ids": [1], "type": "allow_range"}, f"{field}.type"),
    ):
        found = await refusal(at, path, body_of(path, name, params))
        assert found == (400, param), (name, params)
    assert at.cluster.submits == []


async def test_each_prompt_of_a_batch_may_have_its_own_processor(at: House) -> None:
    body = {
        "text": ["a", "b"],
        "custom_logit_processor": ["allow_tokens", None],
        "sampling_params": [{"custom_params": {"token_ids": [1]}}, {}],
    }
    await ok(at, GENERATE, body)
    found = {submit.prompt_ids: submit.sampling.processors for submit in at.cluster.submits}
    assert found == {pack_ids(b"a"): (AllowTokens(token_ids=(1,)),), pack_ids(b"b"): ()}
