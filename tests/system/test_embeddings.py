"""A stack that embeds, asked by the OpenAI client, unmodified, and by SGLang's own door."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import numpy as np
import openai
import pytest
import torch
from openai import AsyncOpenAI
from tests.system.stack import Stack, module_stack, wait_until
from tokenizers import Tokenizer
from transformers import AutoModel

from antiphon import embedded
from antiphon.client import Client

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

TEXTS = ["What is 12 + 30?", "A dog.", "The same beginning, twice. " * 20, "A dog."]
OVERRIDES = json.dumps({"matryoshka_dimensions": [16, 32]})


stack = module_stack("--is-embedding", "--json-model-override-args", OVERRIDES)


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    """The last hidden state of transformers, of length 1."""
    tokenizer = Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))
    model = AutoModel.from_pretrained(embedded.path(), dtype=torch.float32)
    with torch.inference_mode():
        last = [model(torch.tensor([tokenizer.encode(text).ids]))[0][0, -1] for text in TEXTS]
    return [torch.nn.functional.normalize(state, dim=0).tolist() for state in last]


async def test_vectors_are_those_of_transformers_and_the_same_in_both_forms(
    client: AsyncOpenAI, expected: list[list[float]]
) -> None:
    plain = await client.embeddings.create(model="default", input=TEXTS)
    floats = await client.embeddings.create(model="default", input=TEXTS, encoding_format="float")
    ours = [one.embedding for one in plain.data]
    assert ours == [one.embedding for one in floats.data]
    assert [one.index for one in plain.data] == [0, 1, 2, 3]
    assert ours[1] == ours[3]
    assert np.abs(np.array(ours) - np.array(expected)).max() < 0.03  # the model is of bfloat16
    tokenizer = Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))
    counted = sum(len(tokenizer.encode(text).ids) for text in TEXTS)
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == counted


async def test_ids_are_texts_that_were_encoded_before(client: AsyncOpenAI) -> None:
    tokenizer = Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    by_text = await client.embeddings.create(model="default", input=TEXTS)
    by_ids = await client.embeddings.create(model="default", input=ids)
    one = await client.embeddings.create(model="default", input=ids[0])
    theirs, ours = (np.array([each.embedding for each in all_.data]) for all_ in (by_text, by_ids))
    # What was cached is computed in another pass, which may round otherwise.
    assert np.abs(theirs - ours).max() < 0.03
    assert np.abs(theirs[0] - np.array(one.data[0].embedding)).max() < 0.03


async def test_a_beginning_of_a_vector_has_length_one(client: AsyncOpenAI) -> None:
    whole = await client.embeddings.create(model="default", input="A dog.")
    short = await client.embeddings.create(model="default", input="A dog.", dimensions=16)
    start = np.array(whole.data[0].embedding[:16])
    cut = np.array(short.data[0].embedding)
    assert np.abs(cut - start / np.linalg.norm(start)).max() < 0.03
    assert np.linalg.norm(cut) == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.embeddings.create(model="default", input="A dog.", dimensions=17)
    assert refused.value.param == "dimensions"


async def test_many_clients_with_long_batches_get_their_own_vectors(client: AsyncOpenAI) -> None:
    texts = [f"Number {n}." for n in range(100)]
    batches = await asyncio.gather(
        *(client.embeddings.create(model="default", input=texts[n:] + texts[:n]) for n in range(4))
    )
    reported = [np.array([one.embedding for one in batch.data]) for batch in batches]
    for n, vectors in enumerate(reported):
        assert np.abs(np.roll(vectors, n, axis=0) - reported[0]).max() < 0.03


async def test_a_batch_outlives_its_worker(client: AsyncOpenAI, stack: Stack) -> None:
    texts = [f"Text {n} " + "of many words " * 60 for n in range(400)]

    def running() -> bool:
        loads = json.loads(stack.get("/v1/loads"))["loads"]
        return any(load["num_running_reqs"] for load in loads)

    async with asyncio.TaskGroup() as group:
        asked = group.create_task(client.embeddings.create(model="default", input=texts))
        await asyncio.to_thread(wait_until, running, 20, "the batch is under way")
        worker = stack.pid("worker-0")
        assert worker is not None
        os.kill(worker, signal.SIGKILL)
    again = await client.embeddings.create(model="default", input=texts)
    both = asked.result(), again
    first, second = (np.array([one.embedding for one in each.data]) for each in both)
    assert stack.pid("worker-0") not in (None, worker)
    assert np.abs(first - second).max() < 0.03
    assert asked.result().usage == again.usage


async def test_vectors_over_nats_are_the_same(client: AsyncOpenAI, stack: Stack) -> None:
    over_http = await client.embeddings.create(model="default", input=TEXTS * 10)
    async with Client(stack.nats_url) as asker:
        over_nats = await asker.embed(stack.model, TEXTS * 10)
        short = await asker.embed(stack.model, TEXTS, dimensions=16)
    theirs = np.array([one.embedding for one in over_http.data])
    ours = np.array([list(vector) for vector in over_nats.vectors])
    assert np.abs(ours - theirs).max() < 0.03
    assert over_nats.usage.prompt_tokens == over_http.usage.prompt_tokens
    assert [len(vector) for vector in short.vectors] == [16] * len(TEXTS)


async def test_it_generates_nothing_and_says_so(client: AsyncOpenAI) -> None:
    for asked in (
        client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "Hello"}]
        ),
        client.completions.create(model="default", prompt="Hello"),
    ):
        with pytest.raises(openai.BadRequestError, match="this model does not generate"):
            await asked


def test_it_is_healthy_and_ranks_nothing(stack: Stack) -> None:
    stack.get("/health_generate")
    asked = {"query": "a", "documents": ["b"]}
    assert "this model does not rerank" in stack.refusal("/v1/rerank", asked)


def test_encode_tells_the_same(stack: Stack, expected: list[list[float]]) -> None:
    reported = stack.post("/encode", {"text": TEXTS})
    ours = np.array([one["embedding"] for one in reported])
    assert np.abs(ours - np.array(expected)).max() < 0.03
