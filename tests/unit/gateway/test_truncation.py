"""Prompts longer than the context under `allow_auto_truncate`: what is kept, who learns of it."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.support.wait import until
from tests.unit.gateway.calls import CHAT, COMPLETE, Body, ok, post
from tests.unit.gateway.cluster import CONTEXT_TOKENS, MODEL, House, house
from tests.unit.gateway.test_generate import visiting
from tests.unit.gateway.test_pooling import CROSS_ENCODER, EMBED, EMBEDDER, vectors

from antiphon.gateway.requests.submission import RESERVED_OUTPUT_TOKENS
from antiphon.gateway.requests.tokenizer_client import truncated
from antiphon.wire.base import Role
from antiphon.wire.codec import id_count, pack_ids, unpack_ids
from antiphon.wire.digests import BLOCK_TOKENS, block_digests
from antiphon.wire.errors import ErrorReply, PromptTooLong
from antiphon.wire.generate import GenerateEnd, GenerateRequest
from antiphon.wire.ids import ClientKey, RequestId
from antiphon.wire.tokenize import TRUNCATED_CHARACTERS_MAX, EncodeReply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KEPT = CONTEXT_TOKENS - RESERVED_OUTPUT_TOKENS
LONG = "".join(chr(ord("a") + index % 26) for index in range(3 * CONTEXT_TOKENS))
IDS = list(LONG.encode())
TURNS = [{"role": "user", "content": LONG}]


@asynccontextmanager
async def truncating(*, allowed: bool = True) -> AsyncIterator[House]:
    async with house(allow_auto_truncate=allowed) as at:
        yield at


def prompt(at: House, index: int = -1) -> list[int]:
    return list(unpack_ids(at.cluster.submits[index].prompt_ids))


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
        assert prompt(at) == IDS[:KEPT]
        (submit,) = at.cluster.submits
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
        plain = GenerateRequest(key=ClientKey("k"), model=MODEL, max_tokens=50)
        await client.ask(msgspec.structs.replace(plain, **given))
        if allowed:
            end = await client.first(GenerateEnd)
            assert end.usage is not None
            assert end.usage.prompt_tokens == KEPT
            assert prompt(at) == IDS[:KEPT]
        else:
            error = await client.first(ErrorReply)
            assert error.code == PromptTooLong.code


async def test_usage_counts_the_truncated_prompt() -> None:
    async with truncating() as at:
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
    tokens: int, wanted: int, kept: int, limit: int
) -> None:
    async with truncating() as at:
        await ok(at, COMPLETE, {"prompt": LONG[:tokens], "max_tokens": wanted, "min_tokens": 0})
        (submit,) = at.cluster.submits
        assert (id_count(submit.prompt_ids), submit.sampling.max_new_tokens) == (kept, limit)


async def test_min_tokens_are_lowered_with_the_limit() -> None:
    async with truncating() as at:
        body = {"prompt": LONG, "max_tokens": 100, "min_tokens": 50}
        await ok(at, COMPLETE, body)
        (submit,) = at.cluster.submits
    assert (
        submit.sampling.min_new_tokens == submit.sampling.max_new_tokens == RESERVED_OUTPUT_TOKENS
    )


@pytest.mark.parametrize("given", [LONG, IDS], ids=("text", "ids"))
async def test_prompt_is_truncated_to_what_the_largest_worker_holds(given: str | list[int]) -> None:
    async with truncating() as at:
        at.cluster.worker_context = 20
        await until(lambda: _worker_context(at) == 20)
        await ok(at, COMPLETE, {"prompt": given})
        assert prompt(at) == IDS[: 20 - RESERVED_OUTPUT_TOKENS]


async def test_tiny_context_keeps_a_token() -> None:
    async with truncating() as at:
        at.cluster.worker_context = 3
        await until(lambda: _worker_context(at) == 3)
        await ok(at, COMPLETE, {"prompt": LONG, "max_tokens": 9})
        (submit,) = at.cluster.submits
    assert (id_count(submit.prompt_ids), submit.sampling.max_new_tokens) == (1, 2)


def _worker_context(at: House) -> int | None:
    beats = [peer.heartbeat for peer in at.peers if peer.heartbeat.role is Role.WORKER]
    return next((beat.worker.context_tokens for beat in beats if beat.worker is not None), None)


@pytest.mark.parametrize("given", [LONG, IDS], ids=("text", "ids"))
async def test_truncation_is_logged_with_both_lengths(
    given: str | list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "antiphon.gateway.requests.submission")
    async with truncating() as at:
        await post(at, COMPLETE, {"prompt": "short"})
        assert not caplog.records
        await post(at, COMPLETE, {"prompt": given})
    (record,) = caplog.records
    said = vars(record)
    assert (record.levelname, record.message) == ("WARNING", "prompt truncated")
    assert (said["prompt_tokens"], said["kept_tokens"]) == (len(IDS), KEPT)


async def test_counting_reads_the_whole_prompt() -> None:
    async with truncating() as at:
        tokens = await ok(at, "/v1/tokenize", {"prompt": LONG})
        message = await ok(at, "/v1/messages/count_tokens", {"model": MODEL, "messages": TURNS})
        response = await ok(at, "/v1/responses/input_tokens", {"input": LONG})
    counts = tokens["count"], message["input_tokens"], response["input_tokens"]
    assert counts == (len(IDS),) * 3


async def test_what_a_response_says_of_truncation_stands() -> None:
    async with truncating() as at:
        body = {"input": LONG, "store": False}
        assert (await post(at, "/v1/responses", body | {"truncation": "disabled"}))[0] == 400
        assert not at.cluster.submits
        items = [{"role": "user", "content": LONG}, {"role": "user", "content": "hi"}]
        body = {"input": items, "store": False, "truncation": "auto"}
        await ok(at, "/v1/responses", body)
        assert prompt(at) == list(b"hi")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_ollama_request_may_refuse_truncation(path: str) -> None:
    async with truncating() as at:
        body = {"messages": TURNS, "prompt": LONG, "stream": False}
        assert (await post(at, path, body | {"truncate": False}))[0] == 400
        await ok(at, path, body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/score", {"query": LONG, "items": ["a"], "label_token_ids": [5]}),
        ("/v1/score", {"query": IDS, "items": [[5]], "label_token_ids": [5]}),
        (COMPLETE, {"prompt": LONG, "suffix": "end"}),
    ],
)
async def test_prompt_whose_end_is_asked_about_is_refused(path: str, body: Body) -> None:
    async with truncating() as at:
        status, reply, _ = await post(at, path, body)
        assert status == 400
        assert "longer than the model's context length (64 tokens)" in str(reply)
        assert not at.cluster.submits


async def test_decoder_that_reranks_refuses_a_long_document() -> None:
    async with truncating() as at:
        at.cluster.reranks, at.cluster.words = True, {"yes": 250, "no": 251}
        status, _, _ = await post(at, "/v1/rerank", {"query": "q", "documents": [LONG]})
        assert status == 400
        assert not at.cluster.submits


async def test_vector_of_a_long_text_is_that_of_its_beginning() -> None:
    async with truncating() as at:
        at.cluster.pooling = EMBEDDER
        reply = await ok(at, EMBED, {"input": ["abc", LONG]})
        assert vectors(reply) == [[3.0, 0.5], [float(CONTEXT_TOKENS), 0.5]]
        status, _, _ = await post(at, "/api/embed", {"input": LONG, "truncate": False})
        assert status == 400


async def test_document_is_truncated_behind_a_query_that_fits() -> None:
    async with truncating() as at:
        at.cluster.pooling = CROSS_ENCODER
        at.cluster.vector = lambda prompt: [float(len(prompt))]
        await ok(at, "/v1/rerank", {"query": "abc", "documents": [LONG]})
        assert prompt(at) == [*b"abc", *IDS[: CONTEXT_TOKENS - 3]]
        assert at.cluster.submits[-1].sampling.pool.second_from == 3  # pyright: ignore
        status, _, _ = await post(at, "/v1/rerank", {"query": LONG, "documents": ["abc"]})
        assert status == 400
        at.cluster.worker_context = 20
        await until(lambda: _worker_context(at) == 20)
        status, _, _ = await post(at, "/v1/rerank", {"query": LONG[:20], "documents": ["abc"]})
        assert status == 400
        await ok(at, "/v1/rerank", {"query": LONG[:19], "documents": ["abc"]})
        assert prompt(at) == [*IDS[:19], ord("a")]


async def test_session_keeps_the_truncated_prompt() -> None:
    async with truncating() as at:
        name = await ok(at, "/open_session", {})
        params = {"id": name}
        body = {"text": LONG, "rid": "one", "session_params": params}
        await ok(at, "/generate", body)
        assert prompt(at) == IDS[:KEPT]
        params = {"id": name, "rid": "one", "offset": KEPT - 10}
        body = {"text": LONG, "session_params": params}
        await ok(at, "/generate", body)
        assert prompt(at) == (IDS[: KEPT - 10] + IDS)[:KEPT]
        params = {"id": name, "rid": "one", "drop_previous_output": True}
        body = {"text": "z", "session_params": params}
        await ok(at, "/generate", body)
        assert prompt(at) == [*IDS[:KEPT], ord("z")]


@pytest.mark.parametrize("given", [LONG, IDS], ids=("text", "ids"))
async def test_echo_is_the_truncated_prompt(given: str | list[int]) -> None:
    async with truncating() as at:
        reply = await ok(at, COMPLETE, {"prompt": given, "echo": True})
    (choice,) = reply["choices"]
    text = str(choice["text"])
    assert text.startswith(LONG[:KEPT])
    assert not text.startswith(LONG[: KEPT + 1])


async def test_text_that_is_too_long_to_be_encoded_is_refused() -> None:
    async with truncating() as at:
        at.cluster.token_characters = 10
        await ok(at, COMPLETE, {"prompt": "x"})  # the card is known
        text = "a" * TRUNCATED_CHARACTERS_MAX
        status, reply, _ = await post(at, COMPLETE, {"prompt": text + "a"})
        assert status == 400
        assert "what is truncated (524288 characters)" in str(reply)
        assert len(at.cluster.encodes) == 1
        await ok(at, COMPLETE, {"prompt": text})
        assert prompt(at) == [ord("a")] * KEPT


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
