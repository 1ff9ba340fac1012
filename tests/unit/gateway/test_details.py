"""Details of tokens are bounded before anything runs, over HTTP and NATS."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.unit.gateway.calls import CHAT, COMPLETE, GENERATE, HI, Body, failure, ok
from tests.unit.gateway.cluster import HIDDEN_SIZE, House, house
from tests.unit.gateway.test_generate import request, visiting

from antiphon.gateway.requests.output_budget import TEXT_BYTES
from antiphon.wire.errors import ErrorReply
from antiphon.wire.generate import GenerateEnd
from antiphon.wire.sampling import TokenOutputParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MAX = 20_000


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house(details_bytes_max=MAX) as world:
        yield world


async def refused(at: House, path: str, body: Body) -> str:
    """The field that the error of too large a request names."""
    status, error = await failure(at, path, body)
    assert status == 400, error
    assert f"the limit is {MAX} bytes (gateway.details_bytes_max)" in error["message"]
    assert error["message"].startswith(f"{error['param']}: ")
    assert len(at.cluster.submits) < len(body.get("prompt", ("one",)))
    assert at.service.submission.idle
    return error["param"]


@pytest.mark.parametrize(
    ("fields", "size_bytes"),
    [
        ({}, 4 * (8 + 4)),
        ({"return_logprob": True}, 4 * (8 + 8)),
        ({"return_logprob": True, "top_logprobs_num": 3}, 4 * (8 + 8 + 24)),
        ({"return_hidden_states": "last"}, 4 * (8 + 4 + 4 * HIDDEN_SIZE)),
    ],
    ids=["ids", "logprobs", "top logprobs", "hidden states"],
)
async def test_leader_learns_how_large_the_output_may_become(
    at: House, fields: Body, size_bytes: int
) -> None:
    sampling = {"n": 2, "max_new_tokens": 2}
    await ok(at, GENERATE, {"text": "ab", "sampling_params": sampling} | fields)
    assert at.cluster.submits[-1].output_bytes == size_bytes


def native(**fields: object) -> Body:
    return {"text": "ab", "sampling_params": {"n": 20, "max_new_tokens": 50}} | fields


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"messages": HI, "n": 20, "max_tokens": 50, "logprobs": True}, "logprobs"),
        (CHAT, {"messages": HI, "n": 2, "max_tokens": 50, "logprobs": True, "top_logprobs": 20},
         "top_logprobs"),
        (CHAT, {"messages": HI, "max_tokens": 6, "return_hidden_states": True},
         "return_hidden_states"),
        (CHAT, {"messages": HI, "n": 100, "return_token_ids": True}, "return_token_ids"),
        (CHAT, {"messages": HI, "n": 100, "return_meta_info": True}, "return_meta_info"),
        (COMPLETE, {"prompt": "a", "n": 10, "max_tokens": 20, "logprobs": 5}, "logprobs"),
        (COMPLETE, {"prompt": ["a", "b"] * 8, "max_tokens": 20, "logprobs": 3}, "logprobs"),
        (GENERATE, native(return_logprob=True, top_logprobs_num=2), "top_logprobs_num"),
        (GENERATE, native(return_logprob=True, token_ids_logprob=[1, 2, 3, 4]),
         "token_ids_logprob"),
        (GENERATE, native(return_hidden_states=True), "return_hidden_states"),
        (GENERATE, {"text": "ab", "sampling_params": {"n": 128, "max_new_tokens": 50}},
         "sampling_params.n"),
    ],
)  # fmt: skip
async def test_more_than_the_bound_is_refused(at: House, path: str, body: Body, field: str) -> None:
    assert await refused(at, path, body) == field


async def test_logprobs_of_a_prompt_count(at: House) -> None:
    logprobs = {"return_logprob": True, "top_logprobs_num": 6}
    body: Body = {"text": "a" * 60, "sampling_params": {"n": 8, "max_new_tokens": 1}} | logprobs
    await ok(at, GENERATE, body)
    at.cluster.submits.clear()
    assert await refused(at, GENERATE, body | {"logprob_start_len": 0}) == "top_logprobs_num"


async def test_what_just_fits_is_served(at: House) -> None:
    each = 4 + 4 + TEXT_BYTES + 20 * (8 + TEXT_BYTES)
    body: Body = {"messages": HI, "logprobs": True, "top_logprobs": 20}
    most = MAX // each
    await ok(at, CHAT, body | {"max_tokens": most})
    at.cluster.submits.clear()
    assert await refused(at, CHAT, body | {"max_tokens": most + 1}) == "top_logprobs"


async def test_text_alone_is_not_bounded(at: House) -> None:
    assert MAX < 128 * 50 * 4
    await ok(at, CHAT, {"messages": HI, "n": 128, "max_tokens": 50})


async def test_nats_api_refuses_more_than_the_bound_too(at: House) -> None:
    too_many = 1 + MAX // (4 * HIDDEN_SIZE)
    details = TokenOutputParams(hidden=True)
    async with visiting(at) as client:
        await client.ask(request(max_tokens=too_many, details=details))
        error = await client.first(ErrorReply)
        assert (error.code, error.param) == ("invalid_request", "details.hidden")
        assert "gateway.details_bytes_max" in error.message
        assert not client.all(GenerateEnd)
    assert not at.cluster.submits
