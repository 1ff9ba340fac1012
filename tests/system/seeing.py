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
from antiphon.encoder.model import open_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import transformers
    from openai import AsyncOpenAI
    from torch import Tensor

    from antiphon.encoder.preprocess import Preprocessor

TIE = 1e-3
"""Logits that are nearer than this may be taken either way."""
TOKENS = 12


def _frames(images: Sequence[Tensor], ids: Tensor) -> dict[str, Tensor]:
    del ids
    return {"pixel_values": torch.cat([*images])}


@dataclass(frozen=True)
class Seeing:
    """`inputs` are what transformers is given of frames (F, 3, H, W) an image and ids (1, T)."""

    stack: Stack
    folder: Path
    architecture: type[transformers.PreTrainedModel]
    inputs: Callable[[Sequence[Tensor], Tensor], dict[str, Tensor]] = field(default=_frames)
    encoders: Sequence[str] = ("encoder-0",)

    @cached_property
    def reference(self) -> transformers.PreTrainedModel:
        return self.architecture.from_pretrained(self.folder).eval()

    @cached_property
    def preprocess(self) -> Preprocessor:
        return open_model(Settings(), self.folder).preprocess

    def check(self, prompt: list[int], output: list[int], images: list[bytes]) -> None:
        """Compare with what transformers generates of the same prompt and pixels, greedily."""
        frames = [torch.as_tensor(self.preprocess(image)) for image in images]
        ids = torch.tensor([prompt + output])
        with torch.inference_mode():
            shown = self.inputs(frames, ids) if frames else {}
            logits = self.reference(input_ids=ids, **shown).logits[0]
        for index, token in enumerate(output, start=len(prompt) - 1):
            row = logits[index]
            assert row[token] >= row.max() - TIE, f"token {index - len(prompt) + 1} of {output}"

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


async def answer(client: AsyncOpenAI, messages: list[Any]) -> tuple[list[int], list[int]]:
    reply = await client.chat.completions.create(
        model="tiny",
        messages=messages,
        temperature=0,
        max_tokens=TOKENS,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    extra = reply.choices[0].model_extra or {}
    return extra["prompt_token_ids"], extra["response_token_ids"]
