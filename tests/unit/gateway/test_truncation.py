"""Prompts longer than the context under `allow_auto_truncate`: what is kept and reported."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from tests.support.wait import until
from tests.unit.gateway.calls import (
    CHAT,
    COMPLETE,
    GENERATE,
    HI,
    MESSAGES,
    RESPONSES,
    Body,
    failure,
    ok,
    post,
)
from tests.unit.gateway.cluster import CONTEXT_TOKENS, MODEL, House, house
from tests.unit.gateway.test_generate import request, visiting
from tests.unit.gateway.test_pooling import CROSS_ENCODER, EMBED, EMBEDDER, vectors

from antiphon.gateway.requests.submit_request import RESERVED_OUTPUT_TOKENS
from antiphon.gateway.requests.tokenizer_client import truncated
from antiphon.wire.codec import id_count, pack_ids, unpack_ids
from antiphon.wire.digests import BLOCK_TOKENS, block_digests
from antiphon.wire.errors import ErrorReply, PromptTooLong
from antiphon.wire.generate import GenerateEnd
from antiphon.wire.ids import RequestId
from antiphon.wire.tokenize import TRUNCATED_CHARACTERS_MAX, EncodeReply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

KEPT = CONTEXT_TOKENS - RESERVED_OUTPUT_TOKENS
LONG = "".join(chr(ord("a") + index % 26) for index in range(3 * CONTEXT_TOKENS))
IDS = list(LONG.encode())
TURNS = [{"role": "user", "content": LONG}]


def truncating(*, allowed: bool = True) -> AbstractAsyncContextManager[House]:
    return house(allow_auto_truncate=allowed)


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with truncating() as world:
        yield world


LENGTHS = pytest.mark.parametrize("given", [LONG, IDS], ids=("text", "ids"))


async def shrink_worker(at: House, context_tokens: int) -> None:
    """Give the worker a shorter context."""
    at.cluster.worker_context = context_tokens
    await until(lambda: [load.context_tokens for load in at.worker_loads] == [context_tokens])


EVERY = [
    pytest.param(COMPLETE, {"prompt": LONG}, id="completion"),
    pytest.param(COMPLETE, {"prompt": IDS}, id="completion of ids"),
    pytest.param(COMPLETE, {"prompt": LONG, "max_tokens": 100}, id="completion with a limit"),
    pytest.param(CHAT, {"messages": TURNS}, id="chat"),
    pytest.param(CHAT, {"messages": TURNS, "max_tokens": 100}, id="chat with a limit"),
    pytest.param("/v1/responses", {"input": LONG, "store": False}, id="response"),
    pytest.param(
        "/v1/messages", {"model": MODEL, "messages": TURNS, "max_tokens": 100}, id="message"
    ),
    pytest.param("/generate", {"text": LONG}, id="generate"),
    pytest.param("/generate", {"input_ids": IDS}, id="generate from ids"),
    pytest.param("/api/chat", {"messages": TURNS, "stream": False}, id="ollama"),
]


@pytest.mark.parametrize(("path", "body"), EVERY)
async def test_long_prompt_loses_its_end_if_that_is_allowed(path: str, body: Body) -> None:
    async with truncating() as at:
        await ok(at, path, body)
        (submit,) = at.cluster.submits
        assert at.cluster.prompt == IDS[:KEPT]
        assert submit.sampling.max_new_tokens == RESERVED_OUTPUT_TOKENS
    async with truncating(allowed=False) as at:
        assert (await post(at, path, body)).status == 400
        assert not at.cluster.submits


@pytest.mark.parametrize(
    "given", [{"prompt": LONG}, {"prompt_ids": tuple(IDS)}], ids=("text", "ids")
)
@pytest.mark.parametrize("allowed", [True, False])
async def test_long_prompt_over_nats_loses_its_end_if_that_is_allowed(
    given: Body, allowed: bool
) -> None:
    async with truncating(allowed=allowed) as at, visiting(at) as client:
        await client.ask(request(messages=None, max_tokens=50, **given))
        if allowed:
            end = await client.first(GenerateEnd)
            assert end.usage is not None
            assert end.usage.prompt_tokens == KEPT
            assert at.cluster.prompt == IDS[:KEPT]
        else:
            error = await client.first(ErrorReply)
            assert error.code == PromptTooLong.code


async def test_usage_counts_the_truncated_prompt(at: House) -> None:
    reply = await ok(at, COMPLETE, {"prompt": LONG})
    assert reply["usage"]["prompt_tokens"] == KEPT


@pytest.mark.parametrize(
    ("tokens", "wanted", "kept", "limit"),
    [
        (10, 100, 10, CONTEXT_TOKENS - 10),
        (10, 20, 10, 20),
        (CONTEXT_TOKENS - 1, 1, CONTEXT_TOKENS - 1, 1),
        (CONTEXT_TOKENS - 1, 9, CONTEXT_TOKENS - 1, 1),
        (CONTEXT_TOKENS, 1, KEPT, 1),
        (CONTEXT_TOKENS, 0, CONTEXT_TOKENS, 0),
        (CONTEXT_TOKENS + 1, 0, CONTEXT_TOKENS, 0),
    ],
)
async def test_prompt_is_truncated_only_if_it_leaves_no_room_and_the_limit_is_lowered(
    at: House, tokens: int, wanted: int, kept: int, limit: int
) -> None:
    await ok(at, COMPLETE, {"prompt": LONG[:tokens], "max_tokens": wanted, "min_tokens": 0})
    (submit,) = at.cluster.submits
    assert (id_count(submit.prompt_ids), submit.sampling.max_new_tokens) == (kept, limit)


async def test_min_tokens_are_lowered_with_the_limit(at: House) -> None:
    await ok(at, COMPLETE, {"prompt": LONG, "max_tokens": 100, "min_tokens": 50})
    sampling = at.cluster.sampling
    assert sampling.min_new_tokens == sampling.max_new_tokens == RESERVED_OUTPUT_TOKENS


@LENGTHS
async def test_prompt_is_truncated_to_the_context_of_the_largest_worker(
    at: House, given: str | list[int]
) -> None:
    await shrink_worker(at, 20)
    await ok(at, COMPLETE, {"prompt": given})
    assert at.cluster.prompt == IDS[: 20 - RESERVED_OUTPUT_TOKENS]


async def test_tiny_context_keeps_a_token(at: House) -> None:
    await shrink_worker(at, 3)
    await ok(at, COMPLETE, {"prompt": LONG, "max_tokens": 9})
    (submit,) = at.cluster.submits
    assert (id_count(submit.prompt_ids), submit.sampling.max_new_tokens) == (1, 2)


@LENGTHS
async def test_truncation_is_logged_with_both_lengths(
    at: House, given: str | list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "antiphon.gateway.requests.submit_request")
    await post(at, COMPLETE, {"prompt": "short"})
    assert not caplog.records
    await post(at, COMPLETE, {"prompt": given})
    (record,) = caplog.records
    assert (record.levelname, record.message) == ("WARNING", "prompt truncated")
    fields = vars(record)
    assert (fields["prompt_tokens"], fields["kept_tokens"]) == (len(IDS), KEPT)


async def test_counting_reads_the_whole_prompt(at: House) -> None:
    for path, body, field in (
        ("/v1/tokenize", {"prompt": LONG}, "count"),
        (f"{MESSAGES}/count_tokens", {"model": MODEL, "messages": TURNS}, "input_tokens"),
        (f"{RESPONSES}/input_tokens", {"input": LONG}, "input_tokens"),
    ):
        assert (await ok(at, path, body))[field] == len(IDS), path


async def test_truncation_of_a_response_takes_precedence(at: House) -> None:
    body = {"input": LONG, "store": False}
    assert (await post(at, RESPONSES, body | {"truncation": "disabled"})).status == 400
    assert not at.cluster.submits
    items = [*TURNS, *HI]
    await ok(at, RESPONSES, {"input": items, "store": False, "truncation": "auto"})
    assert at.cluster.prompt == list(b"hi")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_ollama_request_may_refuse_truncation(at: House, path: str) -> None:
    body = {"messages": TURNS, "prompt": LONG, "stream": False}
    assert (await post(at, path, body | {"truncate": False})).status == 400
    await ok(at, path, body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/score", {"query": LONG, "items": ["a"], "label_token_ids": [5]}),
        ("/v1/score", {"query": IDS, "items": [[5]], "label_token_ids": [5]}),
        (COMPLETE, {"prompt": LONG, "suffix": "end"}),
    ],
)
async def test_prompt_whose_end_matters_is_refused(at: House, path: str, body: Body) -> None:
    status, error = await failure(at, path, body)
    assert status == 400
    assert "longer than the model's context length (64 tokens)" in error["message"]
    assert not at.cluster.submits


async def test_decoder_that_reranks_refuses_a_long_document(at: House) -> None:
    at.cluster.reranks, at.cluster.words = True, {"yes": 250, "no": 251}
    assert (await post(at, "/v1/rerank", {"query": "q", "documents": [LONG]})).status == 400
    assert not at.cluster.submits


async def test_vector_of_a_long_text_is_that_of_its_beginning(at: House) -> None:
    at.cluster.pooling = EMBEDDER
    reply = await ok(at, EMBED, {"input": ["abc", LONG]})
    assert vectors(reply) == [[3.0, 0.5], [float(CONTEXT_TOKENS), 0.5]]
    assert (await post(at, "/api/embed", {"input": LONG, "truncate": False})).status == 400


async def test_document_is_truncated_after_a_query_that_fits(at: House) -> None:
    at.cluster.pooling = CROSS_ENCODER
    at.cluster.vector = lambda prompt: [float(len(prompt))]

    async def status_of(query: str, document: str) -> int:
        body = {"query": query, "documents": [document]}
        return (await post(at, "/v1/rerank", body)).status

    assert await status_of("abc", LONG) == 200
    assert at.cluster.prompt == [*b"abc", *IDS[: CONTEXT_TOKENS - 3]]
    pool = at.cluster.sampling.pool
    assert pool is not None
    assert pool.second_from == 3
    assert await status_of(LONG, "abc") == 400
    await shrink_worker(at, 20)
    assert await status_of(LONG[:20], "abc") == 400
    assert await status_of(LONG[:19], "abc") == 200
    assert at.cluster.prompt == [*IDS[:19], ord("a")]


async def test_session_keeps_the_truncated_prompt(at: House) -> None:
    name = await ok(at, "/open_session", {})

    async def prompt_of(text: str, place: Body, **fields: str) -> list[int]:
        params = {"session_params": {"id": name} | place}
        await ok(at, GENERATE, fields | {"text": text} | params)
        return at.cluster.prompt

    assert await prompt_of(LONG, {}, rid="one") == IDS[:KEPT]
    within = {"rid": "one", "offset": KEPT - 10}
    assert await prompt_of(LONG, within) == (IDS[: KEPT - 10] + IDS)[:KEPT]
    after_prompt = {"rid": "one", "drop_previous_output": True}
    assert await prompt_of("z", after_prompt) == [*IDS[:KEPT], ord("z")]


@LENGTHS
async def test_echo_is_the_truncated_prompt(at: House, given: str | list[int]) -> None:
    (choice,) = (await ok(at, COMPLETE, {"prompt": given, "echo": True}))["choices"]
    assert choice["text"].startswith(LONG[:KEPT])
    assert not choice["text"].startswith(LONG[: KEPT + 1])


async def test_text_that_is_too_long_to_be_encoded_is_refused(at: House) -> None:
    at.cluster.token_characters = 10
    await ok(at, COMPLETE, {"prompt": "x"})  # the card is known
    text = "a" * TRUNCATED_CHARACTERS_MAX
    status, error = await failure(at, COMPLETE, {"prompt": text + "a"})
    assert status == 400
    assert "what is truncated (524288 characters)" in error["message"]
    assert len(at.cluster.encodes) == 1
    await ok(at, COMPLETE, {"prompt": text})
    assert at.cluster.prompt == [ord("a")] * KEPT


@pytest.mark.parametrize("tokens", [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, 3 * BLOCK_TOKENS + 1])
def test_truncated_reply_holds_what_is_true_of_the_tokens_that_are_kept(tokens: int) -> None:
    ids = pack_ids(range(5 * BLOCK_TOKENS))
    whole = EncodeReply(
        request_id=RequestId("r"),
        token_ids=ids,
        block_digests=block_digests(b"root", ids),
        text_end="<think>",
        vocabulary_size=1000,
        context_tokens=1000,
    )
    cut = truncated(whole, tokens)
    assert list(unpack_ids(cut.token_ids)) == list(range(tokens))
    assert cut.block_digests == block_digests(b"root", cut.token_ids)
    assert (cut.text_end, cut.untruncated_tokens) == ("", 5 * BLOCK_TOKENS)
    assert truncated(cut, 1).untruncated_tokens == 5 * BLOCK_TOKENS
