"""Audio in chats, asked by the OpenAI client, streamed, against transformers."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch
import transformers
from openai import AsyncOpenAI
from tests.support.llava import picture
from tests.support.qwen_audio import PLACEHOLDER, WINDOW_S, inputs, write_qwen_audio
from tests.support.whisper import encoded, tones, wav
from tests.system.seeing import TIE, TOKENS, url
from tests.system.stack import Stack, pages_in_use, read, serving, wait_until

from antiphon.client.client import Client
from antiphon.wire.errors import EngineError
from antiphon.wire.media import MediumInput
from antiphon.wire.tokenize import ChatMessage, MessagePart

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    Samples = NDArray[np.float32]

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

AUDIO: tuple[Samples, Samples] = tones(1.3, seed=1), tones(2.7, seed=2)
QUESTION = "What do you notice? "


@dataclass(frozen=True)
class Listening:
    stack: Stack
    folder: Path

    @cached_property
    def reference(self) -> Any:
        kind = transformers.Qwen2AudioForConditionalGeneration
        return kind.from_pretrained(self.folder).eval()

    @torch.inference_mode()
    def check(self, prompt: list[int], output: list[int], audios: Sequence[Samples]) -> None:
        """Compare with what transformers generates of the same prompt and audio, greedily."""
        ids = torch.tensor([prompt + output])
        beside = inputs(audios) if audios else {}
        logits = self.reference(input_ids=ids, attention_mask=torch.ones_like(ids), **beside)
        rows = logits.logits[0, len(prompt) - 1 : -1]
        for index, (row, token) in enumerate(zip(rows, output, strict=True)):
            assert row[token] >= row.max() - TIE, f"token {index} of {output}"

    def embedded(self) -> int:
        """Audio files that the encoder has embedded."""
        return self._metric("encoder-0", "encoder_request_e2e_latency_seconds_count")

    def cached(self) -> int:
        """Tokens of prompts that were in the prefix cache."""
        return self._metric("gateway-0", "cached_tokens_total")

    def held_bytes(self) -> int:
        """Bytes of media in the gateway's store."""
        return self._metric("gateway-0", "media_bytes")

    def _metric(self, instance: str, name: str) -> int:
        ports = json.loads(self.stack.get("/server_info"))["metrics_ports"]
        text = read(f"http://127.0.0.1:{ports[instance]}/metrics")
        found = re.findall(rf"^antiphon_{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return int(sum(map(float, found)))


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    folder = write_qwen_audio(tmp_path_factory.mktemp("qwen2-audio"))
    with serving(
        *("--model-path", str(folder), "--served-model-name", "tiny", "--dtype", "float32"),
        # Audio is cut by chunks, and by windows of 16 rows of 64 numbers.
        *("--batching-chunk-tokens", "24", "--batching-media-window-bytes", "4096"),
        *("--page-size", "16"),
    ) as stack:
        yield Listening(stack, folder)


@pytest.fixture
async def client(listening: Listening) -> Any:
    base_url = f"{listening.stack.url}/v1"
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as made:
        yield made


def part(data: bytes) -> Any:
    text = base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}}


def linked(data: bytes) -> Any:
    text = base64.b64encode(data).decode()
    return {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{text}"}}


def asked(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": QUESTION}, *parts]}]


async def streamed(client: AsyncOpenAI, messages: list[Any]) -> tuple[list[int], list[int]]:
    """The ids of prompt and output of a streamed answer."""
    stream = await client.chat.completions.create(
        model="tiny",
        messages=messages,
        temperature=0,
        max_tokens=TOKENS,
        stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    prompt, output = list[int](), list[int]()
    async for chunk in stream:
        for choice in chunk.choices:
            extra = choice.model_extra or {}
            prompt = extra.get("prompt_token_ids") or prompt
            output += extra.get("response_token_ids") or []
    return prompt, output


async def test_streamed_answers_are_those_of_transformers(
    listening: Listening, client: AsyncOpenAI
) -> None:
    first, second = map(wav, AUDIO)
    messages = asked(part(first), linked(second), {"type": "text", "text": "And now?"})
    prompt, output = await streamed(client, messages)
    listening.check(prompt, output, AUDIO)
    assert len(output) == TOKENS
    assert listening.embedded() == 2
    other = await streamed(client, asked(part(second), part(first)))
    listening.check(other[0], other[1], AUDIO[::-1])
    cached = listening.cached()
    assert await streamed(client, messages) == (prompt, output)
    found = listening.cached() - cached
    assert found >= len(prompt) - 16, "what was asked before is a prefix hit"
    assert listening.embedded() == 2, "and is embedded once"
    with pytest.raises(AssertionError):
        listening.check(prompt, other[1], AUDIO)


async def test_audio_of_generate_is_that_of_chats(
    listening: Listening, client: AsyncOpenAI
) -> None:
    data = wav(AUDIO[0])
    prompt, output = await streamed(client, asked(part(data)))
    text = (
        f"<|im_start|>user\n{QUESTION}Audio 1: <|audio_bos|>{PLACEHOLDER}<|audio_eos|>\n<|im_end|>"
    )
    made = listening.stack.post(
        "/generate",
        {
            "text": f"{text}\n<|im_start|>assistant\n",
            "audio_data": base64.b64encode(data).decode(),
            "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
            "return_prompt_token_ids": True,
        },
    )
    assert made["output_ids"] == output
    assert made["prompt_token_ids"] == prompt
    mp3 = encoded(AUDIO[0], "mp3", "libmp3lame")
    _, other = await streamed(client, asked(part(mp3)))
    assert len(other) == TOKENS


async def test_nats_clients_send_audio(listening: Listening, client: AsyncOpenAI) -> None:
    data = wav(AUDIO[1])
    expected = await client.chat.completions.create(
        model="tiny", messages=asked(part(data)), temperature=0, max_tokens=TOKENS
    )
    parts = MessagePart(text=QUESTION), MessagePart(medium=0)
    turn = ChatMessage(role="user", content="", parts=parts)
    both = ChatMessage(role="user", content="", parts=(*parts, MessagePart(medium=1)))
    async with Client(listening.stack.nats_url) as nats:
        good = MediumInput(data=data, audio=True)
        completion = await nats.complete(
            "tiny", [turn], media=(good,), temperature=0, max_tokens=TOKENS
        )
        assert completion.text == expected.choices[0].message.content
        long = MediumInput(data=wav(tones(WINDOW_S + 1)), audio=True)
        for bad in (MediumInput(data=b"no audio", audio=True), long, MediumInput(data=data)):
            with pytest.raises(EngineError) as refused:
                await nats.complete("tiny", [both], media=(good, bad))
            assert refused.value.param == "media[1]"


async def test_bad_audio_is_named_and_leaves_nothing_behind(
    listening: Listening, client: AsyncOpenAI
) -> None:
    whole = wav(AUDIO[0])
    image = {"type": "image_url", "image_url": {"url": url(picture(1))}}
    for given, kind, reason in (
        (part(wav(tones(WINDOW_S + 1))), "input_audio", f"this model takes {WINDOW_S} s"),
        (part(wav(tones(0.01))), "input_audio", "too short"),
        (part(b"no audio"), "input_audio", "audio"),
        (part(picture(1)), "input_audio", "audio"),
        ({"type": "input_audio", "input_audio": {"data": "%%%"}}, "input_audio", "base64"),
        (part(encoded(AUDIO[0], "flac", "flac")[:-9000]), "input_audio", "audio"),
        (
            {"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:1/a.wav"}},
            "audio_url",
            "not a public address",
        ),
        (image, "image_url", "takes no images"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="tiny", messages=asked(part(whole), given))
        assert refused.value.param == f"messages[0].content[2].{kind}"
        assert reason in str(refused.value)
    with pytest.raises(openai.BadRequestError, match="17 audio files; the limit is 16"):
        await streamed(client, asked(*[part(whole)] * 17))
    for left, what in (
        (lambda: pages_in_use(listening.stack), "all pages are free"),
        (listening.held_bytes, "no bytes are held"),
    ):
        await asyncio.to_thread(wait_until, lambda left=left: not left(), 10, what)


async def test_what_the_model_takes_is_said(listening: Listening, client: AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    assert (model.model_extra or {})["input_modalities"] == ["text", "audio"]
    info = json.loads(listening.stack.get("/server_info"))["model"]
    assert (info["has_audio_understanding"], info["has_image_understanding"]) == (True, False)
