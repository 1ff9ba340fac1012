"""A value beyond a limit is refused with both numbers: what was sent, and what is allowed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

import pytest
from tests.unit.gateway.test_http import COMPLETE, post

from antiphon.gateway.http.core import fields
from antiphon.gateway.http.openai.schema import CompletionBody
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.unit.gateway.cluster import House

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a"}]
CALLED = [
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "i" * 2000, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    }
]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (
            *(COMPLETE, {"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}),
            *("logit_bias", "logit_bias: 1025 entries; the limit is 1024"),
        ),
        (
            *(COMPLETE, {"prompt": "x", "top_p": 1.5}),
            *("top_p", "top_p: Expected `float` <= 1.0, got 1.5"),
        ),
        (
            *(CHAT, {"messages": MESSAGES, "stop": ["b", "a" * 5000]}),
            *("stop[1]", "stop[1]: 5000 characters; the limit is 4096"),
        ),
        (
            *(CHAT, {"messages": CALLED}),
            *(
                "messages[0].tool_calls[0].id",
                "messages[0].tool_calls[0].id: 2000 characters; the limit is 1024",
            ),
        ),
        (
            *(CHAT, {"messages": MESSAGES, "n": 1000}),
            *("n", "n: Expected `int` <= 128, got 1000"),
        ),
        (
            *(CHAT, {"messages": MESSAGES, "temperature": -0.5}),
            *("temperature", "temperature: Expected `float` >= 0.0, got -0.5"),
        ),
        (
            *(CHAT, {"messages": MESSAGES, "seed": 2**63}),
            *("seed", "seed: Expected `int` <= 9223372036854775807, got 9223372036854775808"),
        ),
        (
            *(CHAT, {"messages": MESSAGES, "max_tokens": 10**99}),
            *("max_tokens", f"max_tokens: Expected `int` <= 2147483647, got 1{39 * '0'}..."),
        ),
        (
            *(CHAT, {"messages": MESSAGES, "regex": "a" * 200_000}),
            *("regex", "regex: 200000 characters; the limit is 131072"),
        ),
        (
            *(COMPLETE, {"prompt": ["a"] * 300}),
            *("prompt", "prompt: 300 prompts; the limit is 256"),
        ),
        (
            *("/detokenize", {"tokens": [[1]] * 300}),
            *("tokens", "tokens: 300 lists; the limit is 256"),
        ),
        (
            *("/generate", {"text": "x", "sampling_params": {"stop_token_ids": [0] * 2000}}),
            *(
                "sampling_params.stop_token_ids",
                "sampling_params.stop_token_ids: 2000 entries; the limit is 1024",
            ),
        ),
    ],
    ids=lambda part: part if isinstance(part, str) and " " not in part else "",
)
async def test_value_beyond_its_limit_is_shown_beside_the_limit(
    at: House, path: str, body: dict[str, object], param: str, message: str
) -> None:
    status, reply, _ = await post(at, path, body)
    assert status == 400
    error = cast("Mapping[str, object]", reply["error"])
    assert (error["message"], error["param"]) == (message, param)
    assert at.cluster.encodes == []


@pytest.mark.parametrize(
    "body",
    [b'{"logit_bias": {"-1": 1}}', b'{"n": true}', b'{"n": null, "best_of": "x"}', b'{"stop": 1}'],
)
def test_value_of_another_kind_is_refused_without_a_count(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        fields.decode(body, CompletionBody)
    assert re.search(r", got [-\d]", refused.value.message) is None
    assert "; the limit is" not in refused.value.message


def test_value_beyond_its_limit_is_refused_before_a_number_of_any_length() -> None:
    body = b'{"prompt": "a", "n": 1000, "top_k": ' + b"9" * 5000 + b"}"
    with pytest.raises(InvalidRequest) as refused:
        fields.decode(body, CompletionBody)
    assert refused.value.param == "n"
