"""APIs that embed, classify and rerank: what they submit, and the form of their replies."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import ollama
import pytest
from aiohttp import web
from tests.support.services import QUICK
from tests.support.wait import until
from tests.unit.encoder.images import BLUE, RED
from tests.unit.gateway.calls import (
    CHAT,
    COMPLETE,
    GENERATE,
    HI,
    Body,
    failure,
    get,
    ok,
    openai_client,
    post,
    refusal,
    running_post,
)
from tests.unit.gateway.cluster import CONTEXT_TOKENS, House, house
from tests.unit.gateway.test_media import serving

from antiphon.config.gateway import MediaConfig
from antiphon.gateway.http.core.pooling import INPUTS_MAX
from antiphon.gateway.requests.pooling import OPEN_MAX
from antiphon.wire.codec import unpack_ids
from antiphon.wire.errors import WorkerLost
from antiphon.wire.sampling import PoolParams, SamplingParams, TokenOutputParams
from antiphon.wire.token_outputs import pack_floats
from antiphon.wire.tokenize import PoolingCard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

EMBED = "/v1/embeddings"
EMBEDDER = PoolingCard(width=2, matryoshka=True)
CLASSIFIER = PoolingCard(scores=True, width=2, labels=("bad", "good"))
CROSS_ENCODER = PoolingCard(scores=True, width=1, labels=("LABEL_0",))
COMPARING = PoolingCard(width=2, images=True)


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house() as world:
        world.cluster.pooling = EMBEDDER
        yield world


@pytest.fixture
async def reranker(at: House) -> House:
    """Scores a document by its number of x."""
    at.cluster.pooling = CROSS_ENCODER
    at.cluster.vector = lambda prompt: [float(prompt.count(b"x"))]
    return at


def vectors(reply: Body) -> list[object]:
    return [one["embedding"] for one in reply["data"]]


async def test_each_text_has_a_vector_in_order(at: House) -> None:
    reply = await ok(at, EMBED, {"input": ["one", "three"], "model": "toy"})
    usage = reply.pop("usage")
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (8, 8)
    assert reply == {
        "object": "list",
        "model": "toy",
        "data": [
            {"object": "embedding", "embedding": [3.0, 0.5], "index": 0},
            {"object": "embedding", "embedding": [5.0, 0.5], "index": 1},
        ],
    }
    sampling = {submit.sampling for submit in at.cluster.submits}
    assert sampling == {SamplingParams(max_new_tokens=0, pool=PoolParams())}


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", {b"ab"}),
        (["ab"], {b"ab"}),
        ([97, 98], {b"ab"}),
        ([[97], [98, 99]], {b"a", b"bc"}),
        ([{"text": "ab"}], {b"ab"}),
    ],
)
async def test_input_may_be_texts_or_ids(at: House, given: object, prompts: set[bytes]) -> None:
    reply = await ok(at, EMBED, {"input": given})
    assert len(vectors(reply)) == len(prompts)
    submitted = {bytes(list(unpack_ids(submit.prompt_ids))) for submit in at.cluster.submits}
    assert submitted == prompts


async def test_texts_and_images_share_a_batch_and_nothing_is_held_behind_it(at: House) -> None:
    at.cluster.pooling = COMPARING
    red, blue = (base64.b64encode(data).decode() for data in (RED, BLUE))
    given = ["ab", {"image": red}, {"text": "c"}, f"data:image/png;base64,{blue}"]
    reply = await ok(at, EMBED, {"input": given})
    assert vectors(reply) == [[2.0, 0.5], [1.0, 0.5], [1.0, 0.5], [1.0, 0.5]]
    media = {submit.media for submit in at.cluster.submits}
    sizes = {(each.width, each.height) for (each,) in media - {()}}
    digests = {each.claim.digest for (each,) in media - {()}}
    assert (sizes, digests) == ({(20, 30)}, {hashlib.sha256(each).digest() for each in (RED, BLUE)})
    await until(lambda: not at.service.submission.media._store.bytes_held)


async def test_an_image_that_several_inputs_have_is_fetched_once() -> None:
    """However many of them run at a time."""
    asked = list[str]()

    async def send(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(body=RED)

    media = MediaConfig(allowed_domains="localhost")
    inputs_max = OPEN_MAX + 2
    async with (
        house(base=msgspec.structs.replace(QUICK, media=media)) as at,
        serving(web.get("/{name}", send)) as port,
    ):
        at.cluster.pooling = COMPARING
        red, other = ({"image": f"http://localhost:{port}/{name}"} for name in ("red", "other"))
        reply = await ok(at, EMBED, {"input": [red, other, *[red] * (inputs_max - 2)]})
        assert len(vectors(reply)) == inputs_max
        assert sorted(asked) == ["/other", "/red"]
        claims = {each.claim.token for submit in at.cluster.submits for each in submit.media}
        assert len(claims) == 2
        await until(lambda: not at.service.submission.media._store.bytes_held)


async def test_openai_client_sends_images(at: House) -> None:
    at.cluster.pooling = COMPARING
    url = f"data:image/png;base64,{base64.b64encode(RED).decode()}"
    parts: Any = [{"image": url}, {"text": "a text"}]
    async with openai_client(at) as client:
        of_parts = await client.embeddings.create(model="toy", input=parts)
        of_url = await client.embeddings.create(model="toy", input=url)
    assert [one.embedding for one in of_parts.data] == [[1.0, 0.5], [6.0, 0.5]]
    assert [one.embedding for one in of_url.data] == [[1.0, 0.5]]


BROKEN = base64.b64encode(b"no image").decode()


@pytest.mark.parametrize(
    ("given", "param", "reason"),
    [
        ({"image": "http://127.0.0.1/a.png"}, "input[1].image", "not a public address"),
        ({"image": BROKEN}, "input[1].image", "not an image of a known format"),
        ({"image": "file:///etc/passwd"}, "input[1].image", "file"),
        ({"image": ""}, "input[1].image", "empty"),
        ({"image": "x", "text": "y"}, "input[1]", "a text or of an image"),
        ({"video": "x"}, "input[1].video", "this model takes no videos"),
        (f"data:image/png;base64,{BROKEN}", "input[1]", "not an image of a known format"),
        ({"text": " "}, "input", "text 1 is empty or white space"),
    ],
)
async def test_an_image_that_cannot_be_embedded_is_named(
    at: House, given: object, param: str, reason: str
) -> None:
    at.cluster.pooling = COMPARING
    status, error = await failure(at, EMBED, {"input": ["a", given]})
    assert (status, error["param"]) == (400, param)
    assert reason in error["message"]
    await until(lambda: not at.cluster.open and at.service.submission.idle)


async def test_models_say_what_they_take(at: House) -> None:
    at.cluster.pooling = COMPARING
    assert (await get(at, "/v1/models/toy")).body["input_modalities"] == ["text", "image"]
    info = (await get(at, "/model_info")).body
    assert (info["has_image_understanding"], info["is_generation"]) == (True, False)


async def test_base64_holds_the_same_numbers(at: House) -> None:
    reply = await ok(at, EMBED, {"input": "abc", "encoding_format": "base64"})
    (text,) = vectors(reply)
    assert base64.b64decode(str(text)) == pack_floats([3.0, 0.5])


async def test_openai_client_reads_the_same_in_both_forms(at: House) -> None:
    async with openai_client(at) as client:
        create = partial(client.embeddings.create, model="toy", input="abc")
        replies = [await create(), await create(encoding_format="float")]
    assert [reply.data[0].embedding for reply in replies] == [[3.0, 0.5]] * 2


async def test_long_batch_is_submitted_a_few_at_a_time(at: House) -> None:
    at.cluster.hold_at = 0
    texts = ["x" * (1 + n % 7) for n in range(OPEN_MAX + 9)]
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ok(at, EMBED, {"input": texts}))
        # The list of open requests may overtake their submissions.
        await until(lambda: min(len(at.cluster.open), len(at.cluster.submits)) >= OPEN_MAX)
        assert len(at.cluster.submits) == len(at.cluster.open) == OPEN_MAX
        at.cluster.go.set()
    assert vectors(task.result()) == [[float(len(text)), 0.5] for text in texts]


async def test_a_client_that_leaves_takes_its_batch_along(at: House) -> None:
    at.cluster.hold_at = 0
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(post(at, EMBED, {"input": ["x"] * (OPEN_MAX + 9)}))
        await until(lambda: len(at.cluster.open) == OPEN_MAX)
        asked.cancel()
    await until(lambda: len(at.cluster.cancelled) == OPEN_MAX and not at.cluster.open)
    assert len(at.cluster.submits) == OPEN_MAX
    assert at.service.submission.idle


async def test_one_text_that_fails_ends_them_all(at: House) -> None:
    at.cluster.row_error = WorkerLost("gone")
    status, error = await failure(at, EMBED, {"input": ["a", "b"]})
    assert (status, error["code"]) == (503, "worker_lost")
    assert not at.cluster.open


async def test_aborted_text_has_no_vector(at: House) -> None:
    async with running_post(at, EMBED, {"input": "a", "rid": "mine"}, hold_at=0) as task:
        await until(lambda: len(at.cluster.open) == 1)
        await ok(at, "/abort_request", {"rid": "mine"})
        await until(task.done)
    status, reply, _ = task.result()
    assert (status, reply["error"]["code"]) == (499, "cancelled")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": ["a", " \n"]}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [999]}, "input"),
        ({"input": "x" * (CONTEXT_TOKENS + 1)}, "input"),
        ({"input": ["a"] * (INPUTS_MAX + 1)}, "input"),
        ({"input": [{"image": "http://x"}]}, "input[0].image"),
        ({"input": ["a", {"text": "b", "video": "http://x"}]}, "input[1].video"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "lora_path": "x"}, "lora_path"),
        ({"input": "data:image/png;base64," + 80 * "A"}, "input"),  # a text like others
        ({}, "input"),
    ],
)
async def test_embeddings_names_the_field_of_a_bad_body(at: House, body: Body, param: str) -> None:
    status, error = await failure(at, EMBED, body)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert not at.cluster.open


async def test_another_model_is_not_found(at: House) -> None:
    status, error = await failure(at, EMBED, {"input": "a", "model": "other"})
    assert (status, error["code"]) == (404, "model_not_found")


async def test_dimensions_are_applied_by_the_worker(at: House) -> None:
    await post(at, EMBED, {"input": "a", "dimensions": 1})
    await post(at, EMBED, {"input": "a", "dimensions": 2})
    pools = [submit.sampling.pool for submit in at.cluster.submits]
    assert pools == [PoolParams(dimensions=1), PoolParams()]


@pytest.mark.parametrize(
    ("card", "complaint"),
    [
        (PoolingCard(width=8), "cannot be truncated"),
        (PoolingCard(width=8, matryoshka=True, cuts=(2, 4)), "this model supports 2, 4"),
    ],
)
async def test_dimensions_are_limited_by_the_model(
    at: House, card: PoolingCard, complaint: str
) -> None:
    at.cluster.pooling = card
    status, error = await failure(at, EMBED, {"input": "a", "dimensions": 3})
    assert (status, error["param"]) == (400, "dimensions")
    assert complaint in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI}),
        (COMPLETE, {"prompt": "a"}),
        (GENERATE, {"text": "a"}),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1]}),
        ("/v1/classify", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/classify", {"text": "a"}),
    ],
)
async def test_embedding_model_does_nothing_else(at: House, path: str, body: Body) -> None:
    status, error = await failure(at, path, body)
    assert (status, error["code"], error["param"]) == (400, "unsupported", "model")
    assert "this model does not" in error["message"]
    assert "an embedding model" in error["message"]


async def test_embedding_model_is_healthy_and_described(at: House) -> None:
    assert (await get(at, "/health_generate")).status == 200
    assert (await get(at, "/model_info")).body["is_generation"] is False
    assert at.cluster.sampling.pool == PoolParams()


async def test_encode_replies_with_one_vector_or_a_list(at: House) -> None:
    one = await ok(at, "/encode", {"text": "abc", "rid": "mine"})
    assert one["embedding"] == [3.0, 0.5]
    meta = one["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 3, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    many = await ok(at, "/encode", {"input_ids": [[97], [97, 98]], "rid": "ours"})
    found = [(each["embedding"], each["meta_info"]["id"]) for each in many]
    assert found == [([1.0, 0.5], "ours_0"), ([2.0, 0.5], "ours_1")]


async def test_ollama_client_gets_the_same_vectors(at: House) -> None:
    async with ollama.AsyncClient(at.url) as client:
        several = await client.embed("toy:latest", ["abc", "x"])
        one = await client.embeddings("toy", "abc")
    assert [list(vector) for vector in several.embeddings] == [[3.0, 0.5], [1.0, 0.5]]
    assert (several.model, several.prompt_eval_count) == ("toy:latest", 4)
    assert list(one.embedding) == [3.0, 0.5]
    for body, field in (({"input": " "}, "input"), ({"input": "a", "truncate": True}, "truncate")):
        status, error = await failure(at, "/api/embed", body)
        assert (status, field in error) == (400, True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": " "}, "text"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "sampling_params": {"temperature": 1}}, "sampling_params"),
    ],
)
async def test_encode_names_the_field_of_a_bad_body(at: House, body: Body, param: str) -> None:
    assert await refusal(at, "/encode", body) == (400, param)


async def test_labels_have_probabilities(at: House) -> None:
    at.cluster.pooling = CLASSIFIER
    at.cluster.vector = lambda prompt: [0.0, 1.0 if prompt == b"good" else -1.0]
    reply = await ok(at, "/v1/classify", {"input": ["good", "bad"]})
    first, second = reply["data"]
    likely = 1 / (1 + math.exp(-1))
    assert (first["label"], first["index"], first["num_classes"]) == ("good", 0, 2)
    assert first["probs"] == pytest.approx([1 - likely, likely])
    assert (second["label"], second["index"]) == ("bad", 1)
    assert reply["usage"]["prompt_tokens"] == 7
    assert (await ok(at, "/classify", {"text": "good"}))["embedding"] == [0.0, 1.0]


async def test_labels_that_do_not_exclude_each_other_have_their_own_probabilities(
    at: House,
) -> None:
    at.cluster.pooling = PoolingCard(scores=True, width=2, labels=("a", "b"), several=True)
    at.cluster.vector = lambda _: [800.0, -800.0]
    (only,) = (await ok(at, "/v1/classify", {"input": "x"}))["data"]
    assert only["probs"] == [1.0, 0.0]


@pytest.mark.parametrize("path", [EMBED, "/v1/rerank"])
async def test_classifier_does_not_embed_or_rerank(at: House, path: str) -> None:
    at.cluster.pooling = CLASSIFIER
    status, error = await failure(at, path, {"input": "a", "query": "a", "documents": ["b"]})
    assert (status, error["param"]) == (400, "model")
    assert "classification model" in error["message"]


async def test_documents_are_ranked_by_score(reranker: House) -> None:
    ranked = await ok(reranker, "/v1/rerank", {"query": "q?", "documents": ["a", "xx", "x"]})
    found = [(one["index"], one["document"]) for one in ranked]
    assert found == [(1, "xx"), (2, "x"), (0, "a")]
    scores = [1 / (1 + math.exp(-count)) for count in (2, 1, 0)]
    assert [one["score"] for one in ranked] == pytest.approx(scores)
    assert ranked[0]["meta_info"]["prompt_tokens"] == 4
    pools = [submit.sampling.pool for submit in reranker.cluster.submits]
    assert pools == [PoolParams(second_from=2)] * 3
    pairs = {(encode.prompt, encode.pair) for encode in reranker.cluster.encodes[1:]}
    assert pairs == {("q?", "a"), ("q?", "xx"), ("q?", "x")}


async def test_plain_scores_are_limited_to_top_n(reranker: House) -> None:
    card = PoolingCard(scores=True, width=1, labels=("x",), plain_score=True)
    reranker.cluster.pooling = card
    body: Body = {"query": "q", "documents": ["a", "xx"], "top_n": 1, "return_documents": False}
    (best,) = await ok(reranker, "/v1/rerank", body)
    assert (best["score"], best["index"], best["document"]) == (2.0, 1, None)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": " ", "documents": ["a"]}, "query"),
        ({"query": "q", "documents": ["a", ""]}, "documents"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "q", "documents": ["a"], "instruct": "be kind"}, "instruct"),
        ({"query": "q", "documents": ["x" * CONTEXT_TOKENS]}, "documents"),
    ],
)
async def test_rerank_names_the_field_of_a_bad_body(
    reranker: House, body: Body, param: str
) -> None:
    assert await refusal(reranker, "/v1/rerank", body) == (400, param)


async def test_decoder_reranks_by_yes_or_no(at: House) -> None:
    at.cluster.pooling, at.cluster.reranks, at.cluster.script = None, True, ("",)
    at.cluster.words = {"yes": 250, "no": 251}
    body: Body = {"query": "q?", "documents": ["a", "bb"], "instruct": "Be kind.", "rid": "mine"}
    ranked = await ok(at, "/v1/rerank", body)
    # The cluster finds yes likelier than no, by a quarter of a nat.
    assert [one["score"] for one in ranked] == pytest.approx([1 / (1 + math.exp(-0.25))] * 2)
    assert [one["document"] for one in ranked] == ["a", "bb"]
    assert ranked[0]["meta_info"]["id"] == "mine_0"
    sampling = {(s.sampling.max_new_tokens, s.sampling.details) for s in at.cluster.submits}
    assert sampling == {(0, TokenOutputParams(named_ids=(250, 251)))}
    assert [turn.role for turn in at.cluster.turns] == ["user", "user"]
    assert at.cluster.template_options == {"instruct": "Be kind."}


async def test_without_a_token_for_yes_nothing_is_ranked(at: House) -> None:
    at.cluster.pooling, at.cluster.reranks = None, True
    status, error = await failure(at, "/v1/rerank", {"query": "q", "documents": ["a"]})
    assert (status, error["param"]) == (400, "model")
    assert "no single token for yes" in error["message"]


@pytest.mark.parametrize(
    ("card", "paths"),
    [
        (EMBEDDER, {EMBED, "/encode", "/api/embed", "/api/embeddings"}),
        (CLASSIFIER, {"/v1/classify", "/classify"}),
        (CROSS_ENCODER, {"/v1/rerank"}),
    ],
)
async def test_every_example_of_the_document_is_served(
    at: House, card: PoolingCard, paths: set[str]
) -> None:
    at.cluster.pooling = card
    at.cluster.vector = lambda _: [0.5] * card.width
    document = (await get(at, "/openapi.json")).body
    for path in paths:
        content = document["paths"][path]["post"]["requestBody"]["content"]
        for example in content["application/json"]["examples"].values():
            await ok(at, path, example["value"])
