"""A stack whose model sees, and what transformers makes of the same prompt and pixels."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from tests.system.stack import Stack, read, wait_until

from antiphon.config.settings import Settings
from antiphon.encoder.model import VisionModel, open_model
from antiphon.model_card.vision.vision_card import read_vision

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import transformers
    from openai import AsyncOpenAI
    from torch import Tensor

    from antiphon.encoder.preprocess import Preprocessor
    from antiphon.wire.claim import PixelLimits

TIE = 1e-3
"""Logits that are nearer than this may be taken either way."""
TOKENS = 12


def _frames(images: Sequence[Tensor], placeholders: Tensor) -> dict[str, Tensor]:
    del placeholders
    return {"pixel_values": torch.cat([*images])}


@dataclass(frozen=True)
class Seeing:
    """`inputs` are what transformers is given beside ids.

    They are made of frames (F, 3, H, W) an image, or of frames of each size of an image that has
    several, and which tokens are placeholders (1, T).
    """

    stack: Stack
    folder: Path
    architecture: type[transformers.PreTrainedModel]
    inputs: Callable[[Sequence[Tensor], Tensor], dict[str, Tensor]] = field(default=_frames)
    encoders: Sequence[str] = ("encoder-0",)

    @cached_property
    def reference(self) -> transformers.PreTrainedModel:
        return self.architecture.from_pretrained(self.folder).eval()

    @cached_property
    def placeholder(self) -> int:
        card = read_vision(self.folder)
        assert card is not None
        return card.placeholder

    @cached_property
    def vision(self) -> VisionModel:
        return open_model(Settings(), self.folder)

    @property
    def preprocess(self) -> Preprocessor:
        return self.vision.preprocess

    def embeds(self, image: bytes, **more: object) -> dict[str, Any]:
        """A part of a message with the embedding of an image that a client has made."""
        made = self.vision.embed(self.preprocess.decoded(image))
        data = base64.b64encode(made.data).decode()
        feature = {"data": data, "shape": [made.tokens, made.hidden]}
        return {"type": "image_embeds", "image_embeds": {"feature": feature, **more}}

    def check(
        self,
        prompt: list[int],
        output: list[int],
        images: list[bytes],
        limits: PixelLimits | None = None,
    ) -> None:
        """Compare with what transformers generates of the same prompt and pixels, greedily."""
        for index, (row, token) in enumerate(
            zip(self.logits(prompt, output, images, limits), output, strict=True)
        ):
            assert row[token] >= row.max() - TIE, f"token {index} of {output}"

    def logprobs(self, prompt: list[int], output: list[int], images: list[bytes]) -> Tensor:
        """The logprobs of the output tokens, (O,), of transformers."""
        rows = self.logits(prompt, output, images).log_softmax(dim=-1)
        return rows[torch.arange(len(output)), torch.tensor(output)]

    def logits(
        self,
        prompt: list[int],
        output: list[int],
        images: list[bytes],
        limits: PixelLimits | None = None,
    ) -> Tensor:
        """What transformers samples each output token from, (O, V)."""
        decoded = [self.preprocess.decoded(image, limits=limits) for image in images]
        parts = [part for each in decoded for part in self.preprocess.frames(each)]
        frames = [torch.as_tensor(part) for part in parts]
        ids = torch.tensor([prompt + output])
        inputs = self.inputs(frames, ids == self.placeholder) if frames else {}
        with torch.inference_mode():
            logits = self.reference(input_ids=ids, **inputs).logits[0]
        return logits[len(prompt) - 1 : -1]

    def worked(self) -> tuple[int, int]:
        """Calls that encoders have received, and images that they have embedded."""
        calls, embedded = (
            sum(self.metric(encoder, name) for encoder in self.encoders)
            for name in (
                "encoder_requests_received_total",
                "encoder_request_e2e_latency_seconds_count",
            )
        )
        return calls, embedded

    def metric(self, instance: str, name: str) -> int:
        """The sum of a metric of an instance over its labels; 0 if it has none."""

        def ports() -> dict[str, int]:
            return json.loads(self.stack.get("/server_info"))["metrics_ports"]

        # A gateway lists an instance after its first heartbeat.
        wait_until(lambda: instance in ports(), 10, f"{instance} is listed")
        text = read(f"http://127.0.0.1:{ports()[instance]}/metrics")
        found = re.findall(rf"^antiphon_{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return int(sum(map(float, found)))


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def message(*parts: str | bytes) -> list[Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url(part)}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


async def answer(
    client: AsyncOpenAI, messages: list[Any], **fields: object
) -> tuple[list[int], list[int]]:
    prompt, output, _ = await scored_answer(client, messages, **fields)
    return prompt, output


async def scored_answer(
    client: AsyncOpenAI, messages: list[Any], **fields: object
) -> tuple[list[int], list[int], Tensor]:
    """The ids of prompt and output, and the logprobs of the output (O,)."""
    reply = await client.chat.completions.create(
        model="tiny",
        messages=messages,
        temperature=0,
        max_tokens=TOKENS,
        logprobs=True,
        extra_body={"return_token_ids": True, "ignore_eos": True, **fields},
    )
    extra = reply.choices[0].model_extra or {}
    found = reply.choices[0].logprobs
    assert found is not None
    logprobs = torch.tensor([each.logprob for each in found.content or ()])
    return extra["prompt_token_ids"], extra["response_token_ids"], logprobs
