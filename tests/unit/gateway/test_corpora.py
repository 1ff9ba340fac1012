"""External corpora over HTTP: tokenized, sent to the workers in bounded parts, removed, listed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.wait import until
from tests.unit.gateway.calls import Body, failure, get, ok, post
from tests.unit.gateway.cluster import CONTEXT_TOKENS

from antiphon.gateway.http.native import corpora
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.command import CORPUS_PART_BYTES_MAX, AddCorpus, ListCorpora, RemoveCorpus
from antiphon.wire.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from tests.unit.gateway.cluster import House

ADD, REMOVE, LIST = "/add_external_corpus", "/remove_external_corpus", "/list_external_corpora"


async def listed(at: House) -> Any:
    status, reply, _ = await get(at, LIST)
    assert status == 200
    return reply


def added(at: House) -> list[AddCorpus]:
    return [order for order in at.cluster.orders if isinstance(order, AddCorpus)]


async def refused(at: House, path: str, body: Body) -> Any:
    """The error of a 400."""
    status, error = await failure(at, path, body)
    assert status == 400
    return error


async def test_corpus_is_added_listed_and_removed(at: House) -> None:
    body = {"corpus_id": "code", "documents": ["abc", "de"]}
    assert await ok(at, ADD, body) == {
        "success": True,
        "message": "The corpus 'code' was added: 5 tokens.",
        "corpus_id": "code",
        "loaded_token_count": 5,
    }
    (order,) = added(at)
    assert (order.part, order.last) == (0, True)
    assert order.documents == (pack_ids(b"abc"), pack_ids(b"de"))
    assert not any(encode.special_tokens for encode in at.cluster.encodes if encode.prompt == "abc")
    assert await listed(at) == {
        "success": True,
        "message": "",
        "corpus_token_counts": {"code": 5},
    }
    assert await ok(at, REMOVE, {"corpus_id": "code"}) == {
        "success": True,
        "message": "The corpus 'code' was removed.",
    }
    assert at.cluster.orders[-1] == RemoveCorpus(corpus_id="code")
    assert (await listed(at))["corpus_token_counts"] == {}


async def test_corpus_without_an_id_gets_one(at: House) -> None:
    names = [(await ok(at, ADD, {"documents": ["ab"]}))["corpus_id"] for _ in range(2)]
    assert names[0] != names[1]
    assert (await listed(at))["corpus_token_counts"] == dict.fromkeys(names, 2)


async def test_large_corpus_is_sent_in_parts_of_bounded_size(at: House) -> None:
    documents = ["x" * 20_000, "y" * 50_000, "z"]
    text = "".join(documents)
    reply = await ok(at, ADD, {"corpus_id": "code", "documents": documents})
    assert reply["loaded_token_count"] == len(text)
    parts = added(at)
    assert [part.part for part in parts] == list(range(3))
    assert [part.last for part in parts] == [False, False, True]
    assert len({part.upload for part in parts}) == 1
    assert all(sum(map(len, part.documents)) <= CORPUS_PART_BYTES_MAX for part in parts)
    ids = [token for part in parts for each in part.documents for token in unpack_ids(each)]
    assert bytes(ids).decode() == text


@pytest.mark.parametrize("text", ["x" * 300, "äöü" * 50, "日本語" * 50, "a𝄞é" * 50])
async def test_texts_fit_the_context_and_are_not_cut_within_a_character(
    at: House, text: str
) -> None:
    await ok(at, ADD, {"documents": [text]})
    (part,) = added(at)
    texts = [bytes(list(unpack_ids(document))) for document in part.documents]
    assert max(map(len, texts)) < CONTEXT_TOKENS
    assert "".join(each.decode() for each in texts) == text


@pytest.mark.parametrize(
    "reason",
    [
        "external corpora are disabled: speculation.algorithm is none",
        "external corpora are disabled: speculation.corpus_draft_tokens is 0",
    ],
)
async def test_disabled_corpora_are_refused_before_texts_are_tokenized(
    at: House, reason: str
) -> None:
    at.cluster.corpora_errors[ListCorpora] = Unsupported(reason)
    assert (await refused(at, ADD, {"documents": ["abc"]}))["message"] == reason
    assert (await refused(at, REMOVE, {"corpus_id": "code"}))["message"] == reason
    status, reply, _ = await get(at, LIST)
    assert (status, reply["error"]["message"]) == (400, reason)
    assert not [encode for encode in at.cluster.encodes if encode.prompt == "abc"]
    assert at.cluster.orders == [ListCorpora()] * 3


@pytest.mark.parametrize(
    ("path", "body", "param", "reason"),
    [
        (ADD, {"documents": ["a"], "corpus_id": "old"}, "corpus_id", "already exists"),
        (ADD, {"documents": []}, "documents", "length >= 1"),
        (ADD, {"documents": [""]}, "documents", "no tokens"),
        (ADD, {"documents": ["a"] * 4097}, "documents", "4097 entries; the limit is 4096"),
        (ADD, {"documents": ["a"], "corpus_id": "x" * 257}, "corpus_id", "the limit is 256"),
        (ADD, {"file_path": "/etc/passwd", "documents": ["a"]}, "file_path", "reads no files"),
        (ADD, {"token_chunks": [[1]], "documents": ["a"]}, "token_chunks", "not accepted"),
        (REMOVE, {"corpus_id": "new"}, "corpus_id", "'new' does not exist"),
        (REMOVE, {}, "corpus_id", "missing required field"),
    ],
)
async def test_invalid_corpus_is_refused(
    at: House, path: str, body: Body, param: str, reason: str
) -> None:
    at.cluster.corpora["old"] = 3
    error = await refused(at, path, body)
    assert error["param"] == param
    assert reason in error["message"]
    assert at.cluster.corpora == {"old": 3}


async def test_error_of_a_worker_is_the_reply(at: House) -> None:
    full = InvalidRequest.at("documents", "the corpora would have more than 10 tokens")
    at.cluster.corpora_errors[AddCorpus] = full
    error = await refused(at, ADD, {"documents": ["abc"]})
    assert (error["param"], error["message"]) == (
        "documents",
        "documents: the corpora would have more than 10 tokens",
    )


async def test_one_corpus_is_added_at_a_time(at: House, monkeypatch: pytest.MonkeyPatch) -> None:
    await ok(at, ADD, {"documents": ["a"]})  # the model's metadata is known from here on
    at.cluster.encoding.clear()
    tokenized = len(at.cluster.encodes)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(ok(at, ADD, {"corpus_id": "first", "documents": ["abc"]}))
        await until(lambda: len(at.cluster.encodes) > tokenized)
        monkeypatch.setattr(corpora, "TURN_S", 0.0)
        status, _, headers = await post(at, ADD, {"documents": ["d"]})
        assert (status, headers["Retry-After"]) == (503, "1")
        monkeypatch.undo()
        second = group.create_task(ok(at, ADD, {"corpus_id": "second", "documents": ["de"]}))
        at.cluster.encoding.set()
    assert first.result()["loaded_token_count"] == 3
    assert second.result()["loaded_token_count"] == 2
