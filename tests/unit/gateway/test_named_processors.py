"""Logit processors by name over HTTP: SGLang's two fields, and never its code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.unit.gateway.calls import ok, post

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

CHAT = {"messages": [{"role": "user", "content": "a"}]}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a", "store": False},
}
NATIVE = "/generate"
BUDGET = {"tokens_max": 2, "begin_id": 1, "closing_ids": [2]}
NAMED = [
    ("disallow_tokens", {"token_ids": [1, 2]}, DisallowTokens(token_ids=(1, 2))),
    ("allow_tokens", {"token_ids": [3]}, AllowTokens(token_ids=(3,))),
    ("allow_range", {"first": 1, "last": 3}, AllowRange(first=1, last=3)),
    (
        "thinking_budget",
        BUDGET,
        ThinkingBudget(tokens_max=2, begin_id=1, closing_ids=(2,)),
    ),
]


async def asked(at: House, path: str, name: object, given: object) -> tuple[int, object]:
    """Post the fields where this path has them; status, and the parameter at fault."""
    if path == NATIVE:
        sampling = {"custom_params": given}
        body = {"text": "a", "custom_logit_processor": name, "sampling_params": sampling}
    else:
        body = BODIES[path] | {"custom_logit_processor": name, "custom_params": given}
    status, reply, _ = await post(at, path, body)
    error = reply.get("error") or {}
    return status, error.get("param")


@pytest.mark.parametrize(("name", "given", "processor"), NAMED)
@pytest.mark.parametrize("path", [*BODIES, NATIVE])
async def test_a_registered_name_is_the_processor_that_the_worker_gets(
    at: House, path: str, name: str, given: object, processor: LogitProcessor
) -> None:
    assert await asked(at, path, name, given) == (200, None)
    (submit,) = at.cluster.submits
    assert submit.sampling.processors == (processor,)


@pytest.mark.parametrize("path", [*BODIES, NATIVE])
async def test_what_is_no_processor_is_refused_by_its_field(at: House, path: str) -> None:
    params = "sampling_params.custom_params" if path == NATIVE else "custom_params"
    for name, given, param in (
        ('{"callable": "8004"}', {}, "custom_logit_processor"),
        ("allow_nothing", {}, "custom_logit_processor"),
        (None, {"token_ids": [1]}, params),
        ("", {"token_ids": [1]}, params),
        ("allow_tokens", None, f"{params}.token_ids"),
        ("allow_tokens", {"token_ids": []}, f"{params}.token_ids"),
        ("allow_tokens", {"token_ids": "1"}, f"{params}.token_ids"),
        ("allow_tokens", {"token_ids": [2**31]}, f"{params}.token_ids[0]"),
        ("allow_tokens", {"token_ids": [2**31 - 1]}, params),  # beyond the vocabulary
        ("allow_range", {"first": 3, "last": 2}, params),
        ("thinking_budget", BUDGET | {"tokens_max": 2**64}, f"{params}.tokens_max"),
        ("allow_tokens", {"token_ids": [1], "ids": [2]}, f"{params}.ids"),
        ("allow_tokens", {"token_ids": [1], "type": "allow_range"}, f"{params}.type"),
    ):
        assert await asked(at, path, name, given) == (400, param), (name, given)
    assert at.cluster.submits == []


async def test_each_prompt_of_a_batch_may_have_its_own(at: House) -> None:
    allow = {"custom_params": {"token_ids": [1]}}
    body = {
        "text": ["a", "b"],
        "custom_logit_processor": ["allow_tokens", None],
        "sampling_params": [allow, {}],
    }
    await ok(at, NATIVE, body)
    told = {submit.prompt_ids: submit.sampling.processors for submit in at.cluster.submits}
    assert told == {pack_ids(b"a"): (AllowTokens(token_ids=(1,)),), pack_ids(b"b"): ()}
