"""A stack that embeds texts and images, asked by the OpenAI client, against transformers."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import struct
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from tests.support.llava import picture
from tests.support.two_towers import TwoTowers, write_clip, write_siglip
from tests.system.seeing import url
from tests.system.stack import Stack, read, serving

from antiphon.client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

WRITERS = {"clip": write_clip, "siglip": write_siglip}
TEXTS = ["A cat.", "What is 12 + 30?"]
IMAGES = [picture(1), picture(2, 90, 31, "JPEG")]


@dataclass(frozen=True)
class Comparing:
    stack: Stack
    folder: Path

    @cached_property
    def reference(self) -> TwoTowers:
        return TwoTowers(self.folder)

    def expected(self, inputs: list[str | bytes]) -> np.ndarray:
        made = [
            self.reference.of_text(each) if isinstance(each, str) else self.reference.of_image(each)
            for each in inputs
        ]
        return np.array([vector.tolist() for vector in made])

    def embedded(self) -> int:
        """Images that the encoder has embedded."""
        ports = json.loads(self.stack.get("/server_info"))["metrics_ports"]
        text = read(f"http://127.0.0.1:{ports['encoder-0']}/metrics")
        name = "antiphon_encoder_request_e2e_latency_seconds_count"
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return int(sum(map(float, found)))


@pytest.fixture(scope="module", params=["clip", pytest.param("siglip", marks=pytest.mark.long)])
def comparing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Comparing]:
    folder = WRITERS[request.param](tmp_path_factory.mktemp(request.param))
    arguments = ("--model-path", str(folder), "--served-model-name", "tiny", "--dtype", "float32")
    with serving(*arguments) as stack:
        yield Comparing(stack, folder)


@pytest.fixture
async def client(comparing: Comparing) -> Any:
    base_url = f"{comparing.stack.url}/v1"
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as made:
        yield made


def item(each: str | bytes) -> Any:
    return each if isinstance(each, str) else {"image": base64.b64encode(each).decode()}


def vectors(reply: Any) -> np.ndarray:
    return np.array([one.embedding for one in reply.data])


async def test_texts_and_images_have_the_vectors_of_transformers(
    comparing: Comparing, client: AsyncOpenAI
) -> None:
    inputs = [TEXTS[0], IMAGES[0], IMAGES[1], TEXTS[1], IMAGES[0]]
    expected = comparing.expected(inputs)
    reply = await client.embeddings.create(model="tiny", input=[item(each) for each in inputs])
    assert np.abs(vectors(reply) - expected).max() < 1e-5
    assert comparing.embedded() == 2
    texts = sum(len(comparing.reference.ids(text)) for text in TEXTS)
    assert reply.usage.prompt_tokens == texts + 3
    again = await asyncio.gather(
        *(client.embeddings.create(model="tiny", input=url(image)) for image in IMAGES)
    )
    assert np.abs(np.concatenate([*map(vectors, again)]) - expected[1:3]).max() < 1e-5
    assert comparing.embedded() == 2, "what was embedded is cached"
    async with Client(comparing.stack.nats_url) as over_nats:
        found = await over_nats.embed("tiny", TEXTS)
    ours = np.array([list(vector) for vector in found.vectors])
    assert np.abs(ours - expected[[0, 3]]).max() < 1e-5


def bomb() -> bytes:
    """A picture whose header says that it has 3.6 billion pixels."""
    data = bytearray(picture(9))
    data[16:24] = struct.pack(">II", 60_000, 60_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


async def test_what_cannot_be_embedded_is_named(client: AsyncOpenAI) -> None:
    whole = picture(9, 200, 200)
    for given, param, reason in (
        (item(whole[: len(whole) // 2]), "input[1].image", "cannot be decoded"),
        (item(bomb()), "input[1].image", "pixels; the limit is"),
        ({"image": "http://localhost/a.png"}, "input[1].image", "could not be fetched"),
        ({"image": url(whole), "text": "A cat."}, "input[1]", "a text or of an image"),
        ("A cat. " * 200, "input", "tokens"),
    ):
        both: Any = ["A dog.", given]
        with pytest.raises(openai.BadRequestError) as refused:
            await client.embeddings.create(model="tiny", input=both)
        assert refused.value.param == param
        assert reason in str(refused.value)
    with pytest.raises(openai.BadRequestError, match="it is an embedding model"):
        await client.completions.create(model="tiny", prompt="Hi")


async def test_what_the_model_takes_is_said(comparing: Comparing, client: AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    assert (model.model_extra or {})["input_modalities"] == ["text", "image"]
    info = json.loads(comparing.stack.get("/server_info"))["model"]
    assert (info["has_image_understanding"], info["is_generation"]) == (True, False)
